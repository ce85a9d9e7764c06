"""The packaging entry: `pip install .`, `pip install -e .` and `pip wheel .` all read this file."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    name="hvfreeze",
    version="0.2.0",
    description="Fine-tune with a voted frozen prefix under Horovod",
    license="Apache-2.0",
    python_requires=">=3.10",
    # Nothing else: cache/, launch/ and analysis/ must never be installed under those bare names.
    packages=find_packages(include=["hvfreeze", "hvfreeze.*"]),
    package_data={"hvfreeze": ["py.typed", "comm/*.conf", "report/templates/*"]},
    entry_points={"console_scripts": ["hvfreeze = hvfreeze.__main__:program"]},
    install_requires=[
        "h5py>=3.8",
        "jinja2>=3.1",
        "matplotlib>=3.7",
        "mpi4py>=3.1",
        "numpy>=1.24",
        "pillow>=9.4",
        "pyyaml>=6.0",
        "scikit-learn>=1.2",
        "scipy>=1.11",
        # Below 2.6, torch.load(weights_only=True) can be made to run a file's code (CVE-2025-32434), below 2.10 to
        # corrupt memory (CVE-2026-24747): hvfreeze/plain_load.py. 2.14 asks for C++20, unlike Horovod as built.
        "torch>=2.10,<2.14",
        "torchvision>=0.25",
        "tqdm>=4.64",
    ],
    # Horovod must be compiled with MPI against the installed torch: launch/bootstrap does it, plain pip does not.
    extras_require={
        "analysis": ["pandas>=2.2"],
        "huggingface": ["transformers>=5.20,<6"],
        "datasets": ["datasets>=3.0"],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings>=0.26", "mkdocstrings-python>=1.11"],
        "mlflow": ["mlflow>=3.0"],
        "mpi": ["horovod==0.28.1"],
        "onnx": ["onnx>=1.17", "onnxscript>=0.4", "onnxruntime>=1.20"],
        "parquet": ["pyarrow>=15"],
        "safetensors": ["safetensors>=0.4"],
        "tensorboard": ["tensorboard>=2.14"],
        "timm": ["timm>=1.0"],
        "wandb": ["wandb>=0.18"],
    },
    zip_safe=False,
)
