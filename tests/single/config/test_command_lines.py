"""A wrong command line gets a line that says what to type; tests/single/test_bad_input.py has more, with their ends."""

from __future__ import annotations

import pytest

from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration, flag_of, number_or_text
from hvfreeze.config.tree import leaves, owners
from hvfreeze.errors import UsageError

TRUNK, GRID, TEXT, NEEDS = (
    "train --strategy shared-trunk ",
    "train --strategy grid ",
    "train --data text --model tiny-lm ",
    " needs ",
)
WRONG = {
    # a word that is not known
    "trian": "did you mean 'train'?",
    "train --learning-rate 0.1": "unknown argument '--learning-rate'; did you mean '--lr'?",
    "train --mirror off": "it is --flips now",
    "train --data photos": "; for a folder of images: --data imagefolder --data-dir photos",
    "train --data digit": "; did you mean 'digits'?",
    "auto digits cifar10": "unknown argument 'cifar10'; give one DATA",
    "auto digits --time-budget 5 minutes": "'minutes'; write the value of --time-budget as one word, or in quotes",
    "train photos": "unknown argument 'photos'; name data with --data or --data-dir",
    "train --checkpoint-every 200s": "must be auto, a number of epochs, or of steps as in 200steps",
    "auto digits --parts 2": "it is a flag of hvfreeze train",
    "auto --epochs 3": "type hvfreeze auto DIR",
    "auto --resume --run-dir /nope": "(/nope) holds no run to resume, and DATA is missing: type hvfreeze auto",
    "auto digit": "DATA (digit) does not exist; did you mean 'digits'?",
    "auto photos --data-dir photos": "--data-dir (photos) must be left out",
    # another command
    "train --data imagefolder --data-dir my --freeze auto --weights DEFAULT": "hvfreeze auto my --weights DEFAULT",
    # a value that no run has
    "train --head all": "--head (all) must be last, mlp",
    TRUNK + "--cut-by given --cut-at 1.5": "--cut-at (1.5) must be whole numbers",
    # a flag of a choice that was not made
    "train --parts 2": f"--parts{NEEDS}--strategy grid or local-critics or stale-ring",
    "train --interval 5": f"--interval{NEEDS}--freeze coherence",
    "auto digits --eta-max 0.2": f"--eta-max{NEEDS}--freeze gradient-norm or percentile",
    "auto digits --optimizer auto --lr 0.0003": f"--lr{NEEDS}a named --optimizer",
    "train --resume-inexact": f"--resume-inexact{NEEDS}--resume",
    "train --epochs 2 --time-budget 1m": f"--epochs{NEEDS}a run without --time-budget",
    "train --flips on --augment none": f"--flips{NEEDS}--augment fresh or views:K, or --head-fit exact or kernel",
    # two that exclude each other, or belong together
    "train --cache on": "--cache (on) must be used with --augment none or views:K",
    "train --freeze static": "--freeze (static) must be given together with --cut K",
    "train --resume": "--resume must be given together with --run-dir DIR",
    TRUNK + "--freeze linear": "--freeze (linear) must be left out with --strategy shared-trunk",
    "train --strategy stale-ring --mixup 0.2": "--mixup (0.2) must be left out with --strategy stale-ring",
    TRUNK + "--heads 2 --tasks a.csv": "--heads (2) must be left out with --tasks",
    TRUNK + "--tasks a.csv --head-lr 0.1": "--head-lr (0.1) must be left out",
    GRID + "--cut-by given": "--cut-at must be given together with --cut-by given",
    "train --head multi-level": "pass --head-fit exact or kernel too",
    "train --head-fit kernel --augment none": "--head (last) must be multi-level with --head-fit kernel",
    "train --head-fit exact": "--augment (fresh) must be none or views:K with --head-fit exact or kernel",
    "train --head-fit exact --augment none --freeze linear": "--freeze (linear) must be left out with --head-fit exact",
    "train --flips mean": "--flips (mean) must be auto, on or off unless --head is multi-level",
    "train --keep best": f"--keep{NEEDS}--validation-fraction F, such as 0.1",
    "train --early-stop 0 --validation-fraction 0.1": "--early-stop (0) must be at least 1",
    "train --class-weights heavy": "must be none, balanced, or NAME=W",
    "train --class-weights a=1,a=2": "must be none, balanced, or NAME=W",
    TRUNK + "--class-weights balanced": "set loss: balanced in --tasks FILE",
    TEXT + "--class-weights balanced": f"--class-weights{NEEDS}--data of images",
    "train --data text --model resnet18": "--model (resnet18) must be tiny-lm or package:function with --data text",
    "train --model tiny-lm": "--model (tiny-lm) must be given together with --data text",
    "train --context 9": f"--context{NEEDS}--data text",
    TEXT + "--strategy grid": "--strategy (grid) must be replicas or local-sgd or stale-ring with --data text",
    TEXT + "--validation-fraction 0.2": "--augment (fresh) must be none with --data text and --validation",
    "train --freeze linear --shadow linear": "--shadow (linear) must be another criterion than linear",
}


def refusal(line: str) -> str:
    """Return the message of a refused command line."""
    with pytest.raises(UsageError) as found:
        configuration(parse(line.split()))
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(("line", "words"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_command_line_gets_a_line_that_says_what_to_type(line: str, words: str) -> None:
    assert words in refusal(line)


NAMES = {"model", "blocks", "weights", "tasks", "run_dir", "data_dir", "cache_dir", "data_seed", "std"}
NAMES |= {"image_column", "label_column", "label_delimiter", "split_column", "weight_column"}
"""Settings that are names or any number, or are checked with another one."""
VALUED = [name for name, (_, _, kind) in leaves().items() if bool not in (kind, *getattr(kind, "__args__", ()))]


@pytest.mark.parametrize("name", sorted({*VALUED} - NAMES))
def test_a_value_out_of_bounds_is_refused_with_the_flag_and_the_value(name: str) -> None:
    section, _, kind = leaves()[name]
    value = {int: "-1", float: "nan", str: "nonsense"}[number_or_text(kind)]
    of = f"--strategy {owners(name)[0]} " if section == "strategy" and name != "strategy" else ""
    assert refusal(f"train {of}{flag_of(name)}={value}").startswith(f"{flag_of(name)} ({value}) must be ")
