"""The sections of a configuration: frozen dataclasses, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from hvfreeze.config.rules import (
    FITS,
    RESAMPLES,
    TOKENS,
    TRACKERS,
    at_least,
    between,
    choice,
    is_table,
    number_list,
    one_of,
    parse_bytes,
    parse_cadence,
    parse_channels,
    parse_class_weights,
    parse_colour,
    parse_compression,
    parse_dirichlet,
    parse_duration,
    parse_mlp,
    parse_parts,
    parse_recipe,
    parse_views,
    rule,
    weights_entry,
)
from hvfreeze.config.section import (
    Alternative,
    Bound,
    By,
    Count,
    Decay,
    Mixup,
    Part,
    Positive,
    Quorum,
    Section,
    Seed,
    Steps,
    Threads,
    Window,
    given_to,
    setting,
)
from hvfreeze.user_code import HF, TIMM, check_named_code, is_named_code

Channels = tuple[float, float, float]
TEXT = "text"
DATA_SETS = ("digits", "cifar10", "cifar100", "imagefolder", TEXT)
TINY_LM = "tiny-lm"
"""The model for a text."""
MOST_PIXELS = 4096
"""Side of an image."""
CRITERIA = ("coherence", "gradient-norm", "percentile", "linear", "geometric")
"""What proposes a cut; `freezing/criteria.py` says how."""
WATCH_NORMS = ("gradient-norm", "percentile")
"""Those that look at the norms of gradients."""
AUTO = "auto"
"""A value of --freeze that is no criterion: fine-tunes while it pays and fits the head, see `training/auto`."""
AUTO_PARTS = ("votes", "guard", "last-solve")
VOTE_WEIGHTS = ("uniform", "samples", "loss", "coverage", "snr")
MOST_CELLS = 64
METRICS = {
    "classes": ("accuracy", "balanced-accuracy", "macro-f1", "auroc"),
    "labels": ("average-precision", "macro-f1"),
    "numbers": ("r2", "mae"),
}
"""By what labels are; the first is the default."""


def voting(config: Any) -> tuple[str, ...]:
    """Return the criteria that a configuration asks, in a vote or without effect."""
    votes = config.freeze.auto and config.freeze.has("votes")
    return (*config.freeze.criteria(), *(("coherence",) if votes else ()))


def is_cut(config: Any) -> bool:
    """Tell whether a configuration uses the blocks that a model is cut into; the last one has the head's rate."""
    freeze, head, rates = config.freeze, config.head, config.optimizer.head_lr
    asked = freeze.freeze != "none" or bool(freeze.shadow_names()) or head.head == "multi-level" or rates is not None
    return asked or config.strategy.cuts(config)


IMAGES = Alternative("--data of images", lambda config: config.data.data != TEXT)
TABLE = Alternative("--data of a table", lambda config: is_table(config.data.data))
COLUMNS = Alternative(
    "--data of a table, or hf:PATH", lambda config: is_table(config.data.data) or config.data.data.startswith(HF)
)
FILES = Alternative("another --data than digits", lambda config: config.data.data != "digits")
WINDOWS = Alternative(f"--data {TEXT}", lambda config: config.data.data == TEXT)
DRAWN = Alternative("--augment fresh or views:K", lambda config: config.data.augment != "none")
PRETRAINED = Alternative("--weights", lambda config: config.model.weights != "none")
TRAINED = Alternative("--head-fit sgd", lambda config: config.freeze.auto or not config.head.solved)
POOLED = Alternative("--head multi-level", lambda config: config.head.head == "multi-level")
KERNEL = Alternative("--head-fit kernel", lambda config: config.head.head_fit == "kernel")
SGD = Alternative("--optimizer sgd", lambda config: config.optimizer.optimizer == "sgd")
NAMED = Alternative("a named --optimizer", lambda config: config.optimizer.optimizer != AUTO)
STATIC = Alternative("--freeze static", lambda config: config.freeze.freeze in ("static", AUTO))
VOTED = Alternative(f"--freeze {', '.join(CRITERIA)}, or --shadow", lambda config: bool(voting(config)))
GAINS = Alternative("--freeze coherence", lambda config: "coherence" in voting(config))
NORMS = Alternative("--freeze gradient-norm or percentile", lambda config: bool(set(WATCH_NORMS) & {*voting(config)}))
SEEN = Alternative(
    "--freeze gradient-norm or percentile, or --vote-weight snr",
    lambda config: NORMS.holds(config) or (VOTED.holds(config) and config.freeze.vote_weight == "snr"),
)
OF_AUTO = Alternative("hvfreeze auto", lambda config: config.freeze.auto)
CACHED = Alternative("--cache auto or on", lambda config: config.cache.cache != "off")

AUTO_RATE = 3e-4
"""AdamW's learning rate in hvfreeze auto, for weights that serve the task."""
AUTO_DEFAULTS = {
    "head": "multi-level",
    "head_fit": "kernel",
    "epochs": 16,
    "batch_size": 32,
    "optimizer": AUTO,
    "schedule": "cosine",
    "evaluate_every": 1000,
}
"""What settings are in hvfreeze auto where they are not given."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Which samples are trained on, who gets them and how they are augmented."""

    data: str = setting(
        "digits",
        "NAME",
        "digits, cifar10, cifar100, imagefolder, text, a table (.csv, .tsv, .parquet) with a row for each image, "
        "hf:PATH (a data set of Hugging Face's library on disk), or package:function",
    )
    data_dir: str | None = setting(
        None,
        "DIR",
        "where the data lies; default $HVFREEZE_DATA or a cache directory, none with imagefolder; of a table's images: "
        "the table's folder; with --data text a file, default: the sources of Python's standard library",
        brief="where a built-in data set, or a table's images, are",
        of=FILES,
    )
    context: Window = setting(64, "N", "characters of a window", of=WINDOWS)
    task: Annotated[str, choice("auto", "classes", "labels", "numbers")] = setting(
        "auto",
        "WHAT",
        "what labels are: classes (one a sample), labels (several a sample), numbers (regression), or auto (as they "
        "look)",
        brief="classes, labels (several a sample) or numbers",
        of=IMAGES,
    )
    image_column: str | None = setting(
        None, "NAME", "the column with the images, or their paths; default: image, path and the like", of=COLUMNS
    )
    label_column: str | None = setting(
        None,
        "NAME,...",
        "the column with the labels; several columns have a label or a number each; default: label, class and the like",
        brief="of a table: the column with the labels",
        of=COLUMNS,
    )
    label_delimiter: str | None = setting(
        None, "TEXT", "between the labels in one cell, as in 'cat,dog'; default with --task labels: a comma", of=TABLE
    )
    split_column: str | None = setting(
        None,
        "NAME",
        "the column that says train, val or test; none: a tenth is held out; default: split, subset and the like",
        of=TABLE,
    )
    test_table: str | None = setting(None, "FILE", "a table with the test samples, of the same columns", of=TABLE)
    train_samples: Count | None = setting(
        None, "N", "train on a stratified subset of N samples", brief="train on so many samples"
    )
    validation_fraction: Part = setting(
        0.0,
        "F",
        "hold out this part of the training set, and evaluate on it alone",
        brief="hold out this share and evaluate on it",
    )
    image_size: Annotated[int, between(1, MOST_PIXELS)] | None = setting(
        None,
        "PIXELS",
        "side of the squares that images are brought to, see --fit; default: the images' own size, 128 for a folder of "
        "images that differ in size; with --model hf:... what its image processor says",
        brief="side in pixels; own size, or 128 if unequal",
        of=IMAGES,
    )
    fit: Annotated[str, choice(*FITS)] = setting(
        "crop",
        "HOW",
        "how images that are not square become it: crop (the centre square), squash (each side scaled by itself) or "
        "pad (a border of the colour --background)",
        of=IMAGES,
    )
    background: str = setting(
        "white",
        "COLOUR",
        "behind transparent parts of images and around images that are padded: white, black, or R,G,B in 0..255",
        of=IMAGES,
    )
    resize: int | None = setting(
        None,
        "PIXELS",
        "resize to this first; training crops --image-size out of it, evaluation takes the centre",
        of=IMAGES,
    )
    resample: Annotated[str, choice(*RESAMPLES)] = setting(
        "bilinear", "FILTER", "how files of images are resized: " + ", ".join(RESAMPLES), of=IMAGES
    )
    mean: str | None = setting(
        None,
        "M",
        "normalise with this mean, one for all channels or three; default: the weights', else the data's",
        of=IMAGES,
    )
    std: str | None = setting(
        None, "S", "normalise with this standard deviation, given together with --mean", of=IMAGES
    )
    data_seed: int | None = setting(None, "SEED", "seed of subset, shards, order and views; default: --seed")
    shuffle: Annotated[str, choice("shard", "global")] = setting(
        "shard", "HOW", "shard (fixed shards, shuffled inside) or global (dealt out anew each epoch)"
    )
    partition: str = setting("iid", "HOW", "iid, or dirichlet:A for label skew between ranks", of=IMAGES)
    shard_sizes: str = setting("equal", "HOW", "equal, or one relative size per rank, as in 3,1,1,1")
    skip_bad: bool = setting(
        False,
        "",
        "leave out images that cannot be decoded, which are looked for before the start",
        brief="leave out images that cannot be decoded",
        of=IMAGES,
    )
    augment: str = setting(
        "fresh",
        "HOW",
        "fresh (new draws every epoch), none, or views:K (K fixed views of each sample)",
    )
    flips: Annotated[str, choice("auto", "on", "mean", "off")] = setting(
        "auto",
        "WHETHER",
        "mirror images among the views, and for a solved head beside every sample: on (unless the data set rules them "
        "out), mean (a solved head reads the mean of an image's features and its mirror image's; answers take twice "
        "as long), auto (on; in hvfreeze auto and more than 25 000 samples mean; off where training samples show "
        "that left and right differ) or off (they differ)",
        brief="horizontal flips: auto, on, mean or off",
        of=IMAGES,
    )

    recipe: str = setting(
        "crop",
        "LIST",
        "how views are made: crop (out of a black border) or random-resized-crop, with trivial-augment, color-jitter",
        of=(IMAGES, DRAWN),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_named_code(self.data):
            check_named_code("data", self.data)
        elif not is_table(self.data) and not (self.data.startswith(HF) and self.data != HF):
            one_of("data", self.data, DATA_SETS)
        # A shell gives that for a variable that is not set.
        rule(self.data_dir != "", "data-dir", repr(self.data_dir), "a path, and not empty")
        rule(self.data != "imagefolder" or bool(self.data_dir), "data", self.data, "given together with --data-dir DIR")
        larger = self.resize is None or (self.image_size is not None and self.image_size <= self.resize <= MOST_PIXELS)
        rule(
            larger, "resize", self.resize, f"given together with --image-size, at least that and at most {MOST_PIXELS}"
        )
        sized = self.fit == "crop" or self.image_size is not None
        rule(sized, "fit", self.fit, "given together with --image-size, the side of the squares")
        rule(self.test_table is None or is_table(self.test_table), "test-table", self.test_table, "a table, as --data")
        rule(self.label_delimiter != "", "label-delimiter", "''", "a text, and not empty")
        self.background_colour()
        self.statistics()
        text, alone = self.data == TEXT, self.validation_fraction == 0 or self.augment == "none"
        why = "other views of windows reach into those that are held out"
        rule(not text or alone, "augment", self.augment, "none with --data text and --validation-fraction", why)
        parse_views(self.augment)
        parse_recipe(self.recipe)
        parse_dirichlet(self.partition)
        if self.shard_sizes != "equal":
            sizes = number_list("shard-sizes", self.shard_sizes)
            ok = all(math.isfinite(s) and s > 0 for s in sizes)
            rule(ok, "shard-sizes", self.shard_sizes, "equal, or one positive, finite number per rank")

    @property
    def stored_size(self) -> int | None:
        """Side of the squares that images are decoded to; None keeps their size."""
        return self.resize or self.image_size

    def background_colour(self) -> tuple[int, int, int]:
        """Return red, green and blue of --background, 0 to 255."""
        return parse_colour("background", self.background)

    def statistics(self) -> tuple[Channels, Channels] | None:
        """Return the mean and standard deviation that were given, of each channel; None where they were not."""
        if self.mean is None and self.std is None:
            return None
        rule(self.mean is not None and self.std is not None, "mean", self.mean, "given together with --std")
        mean, std = parse_channels("mean", self.mean or ""), parse_channels("std", self.std or "")
        rule(all(number > 0 for number in std), "std", self.std, "above 0")
        return mean, std

    def mirrors(self, flips: bool) -> bool:
        """Tell whether mirror images are trained on; `flips` is the data set's word that they show the same class."""
        return flips and self.flips != "off"

    def cacheable(self) -> bool:
        """Tell whether a sample's view can come again, so that its activations are worth keeping."""
        return self.augment != "fresh"


@dataclass(frozen=True, kw_only=True)
class FreezeConfig(Section):
    """Who proposes a cut, when, and how the ranks vote on it."""

    freeze: Annotated[str, choice("none", "static", *CRITERIA, AUTO)] = setting(
        "none",
        "CRITERION",
        f"none, static (with --cut), or a criterion by which ranks vote: {', '.join(CRITERIA)}",
    )
    cut: Annotated[int, at_least(0, "blocks")] | None = setting(
        None, "K", "the first K blocks are frozen; in hvfreeze auto while the others are fine-tuned", of=STATIC
    )
    interval: Annotated[int, at_least(1, "step")] | None = setting(
        None, "STEPS", "steps between votes; default: half an epoch", of=VOTED
    )
    freeze_warmup: Steps | None = setting(None, "STEPS", "steps before the first vote; default: one epoch", of=VOTED)
    patience: Count = setting(
        1, "N", "a rank proposes what its criterion wanted in N intervals in a row; coherence: in 2 at least", of=VOTED
    )
    eta_max: Bound = setting(0.2, "ETA", "a block whose gradient norm changes faster is not frozen", of=NORMS)
    min_gain: Positive = setting(
        0.02, "X", "freeze blocks that gain less than X of what their part of a step's time would", of=GAINS
    )
    statistics: Annotated[str, choice("auto", "batch", "kept")] = setting(
        "auto",
        "WHICH",
        "that BatchNorm uses in blocks that train: batch (each batch's), kept (the weights'), or auto (with --weights "
        "kept where training has fewer than 20 batches, or hvfreeze auto your own --optimizer or --lr; else batch)",
        of=TRAINED,
    )
    signal: Annotated[str, choice("local", "averaged")] = setting(
        "local",
        "WHICH",
        "gradients that the criterion sees: local (each rank's own) or averaged (no real vote)",
        of=SEEN,
    )
    vote_weight: str = setting(
        "uniform", "HOW", "uniform, samples, loss, coverage, snr, or one number per rank", of=VOTED
    )
    quorum: Quorum = setting(0.5, "Q", "part of the weight that must support a cut, in (0, 1]", of=VOTED)
    shadow: str = setting("none", "LIST", "criteria that are scored and logged without effect")
    auto_without: str = setting(
        "none", "LIST", "leave out votes, guard (keep what is best on held-out samples), last-solve", of=OF_AUTO
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        static = self.freeze == "static"
        rule(not static or self.cut is not None, "freeze", self.freeze, "given together with --cut K")
        own = self.signal == "local" or self.freeze != "coherence"
        rule(own, "signal", self.signal, "local with --freeze coherence, which compares the ranks' gradients")
        if self.vote_weight not in VOTE_WEIGHTS:
            weights = number_list("vote-weight", self.vote_weight, also=", ".join(VOTE_WEIGHTS))
            ok = all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
            rule(ok, "vote-weight", self.vote_weight, "finite numbers, none negative, not all 0")
        for name in self.shadow_names():
            rule(name in CRITERIA, "shadow", name, "none or a list out of " + ", ".join(CRITERIA))
        parse_parts("auto-without", self.auto_without, AUTO_PARTS)

    def of_script(self) -> FreezeConfig:
        """Return these settings with a training script's default: coherence, where only other settings were given.

        Raises:
            UsageError: they are settings of another criterion, which must then be named.
        """
        given = given_to(self)
        if not given or "freeze" in given:
            return self
        other = "given together with freeze='gradient-norm' or 'percentile', whose bound it is"
        rule("eta_max" not in given, "eta-max", self.eta_max, other)
        return replace(self, freeze="coherence")

    @property
    def votes(self) -> bool:
        """Whether ranks vote on the cut."""
        return self.freeze in CRITERIA

    @property
    def auto(self) -> bool:
        """Whether the run finds out whether fine-tuning pays."""
        return self.freeze == AUTO

    def has(self, part: str) -> bool:
        """Tell whether a part of hvfreeze auto, one of `AUTO_PARTS`, is not left out."""
        return part not in parse_parts("auto-without", self.auto_without, AUTO_PARTS)

    def criteria(self) -> tuple[str, ...]:
        """Return the criteria that are asked at a vote: the one that decides, where one does, and the shadows."""
        return (*([self.freeze] if self.votes else []), *self.shadow_names())

    def shadow_names(self) -> tuple[str, ...]:
        """Return the criteria that are scored and logged without effect."""
        return () if self.shadow == "none" else tuple(self.shadow.split(","))


@dataclass(frozen=True, kw_only=True)
class CacheConfig(Section):
    """Whether and where the frozen prefix's activations are kept."""

    cache: Annotated[str, choice("off", "auto", "on")] = setting(
        "off",
        "MODE",
        "off, auto (when it pays) or on; needs --augment none or views:K",
        brief="store features: off, auto or on",
    )
    cache_dir: str | None = setting(
        None,
        "DIR",
        "where its files stay after the run; default: the run directory",
        of=CACHED,
    )
    cache_dtype: Annotated[str, choice("native", "float16", "bfloat16")] = setting(
        "native", "TYPE", "native (exact), float16 or bfloat16", of=CACHED
    )
    cache_limit: str = setting("none", "SIZE", "disk space over all ranks, as in 20G; default: none", of=CACHED)
    cache_shared: bool = setting(
        False,
        "",
        "ranks may read each other's files on a shared file system; files of other users and groups are trusted",
        of=CACHED,
    )
    cache_failure: Annotated[str, choice("recompute", "stop")] = setting(
        "recompute", "HOW", "on a full disk or a damaged file: recompute (go on without it) or stop", of=CACHED
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limit_bytes()

    def limit_bytes(self) -> int | None:
        """Return the budget in bytes over all ranks, None where there is none."""
        return parse_bytes(self.cache_limit)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The network, where it may be cut, and what it starts from."""

    model: str = setting(
        "resnet18",
        "NAME",
        "a torchvision classifier, resnet20, resnet110, mlp or mlp-WxW... (hidden layers of W neurons), tiny-lm for "
        "--data text, timm:NAME, hf:FOLDER or hf:ORGANISATION/NAME (transformers), or package:function for your own",
        brief="resnet18, timm:NAME, hf:FOLDER, package:function",
    )
    blocks: str = setting(
        "auto",
        "HOW",
        "where it may be cut: stage, residual, paper or NAME,NAME,...; auto: residual for strategies that share "
        "blocks out evenly, else stage",
    )
    weights: str = setting(
        "none",
        "FILE",
        "none, DEFAULT or another of torchvision's names such as IMAGENET1K_V2 (downloaded), a URL, or a file with a "
        "state_dict, also as safetensors; default: none, with --model hf:... DEFAULT, those beside the model",
        brief="DEFAULT (downloaded), a URL or a file",
    )
    reset_head: bool = setting(
        False, "", "start the head afresh, also where the weights have one of as many classes", of=(PRETRAINED, TRAINED)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule(bool(self.model), "model", repr(self.model), "the name of a classification model")
        parse_mlp("model", self.model)
        if is_named_code(self.model):
            check_named_code("model", self.model)
            own = weights_entry(self.weights) is None
            rule(own, "weights", self.weights, "none or a file with a model of your own")
        whole = not self.model.startswith((TIMM, HF)) or weights_entry(self.weights) in (None, ("", "DEFAULT"))
        rule(whole, "weights", self.weights, "none, DEFAULT or a file with a model of timm's or Hugging Face's")
        rule(bool(self.blocks), "blocks", repr(self.blocks), "auto, stage, residual, paper or NAME,NAME,...")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Section):
    """The head: what it reads, and whether it is trained with the rest or solved on frozen blocks."""

    head: str = setting(
        "last",
        "WHICH",
        "last (the model's own), mlp or mlp-WxW... (hidden layers of W neurons in its place) or multi-level (reads "
        "every block)",
    )
    head_fit: Annotated[str, choice("sgd", "exact", "kernel")] = setting(
        "sgd",
        "HOW",
        "sgd (trained with the rest), or, all blocks frozen, solved by all ranks: exact (logistic regression), kernel "
        "(likeness to every training sample)",
    )
    pool: Annotated[int, between(1, MOST_CELLS)] = setting(
        4, "P", "each block's map is averaged to at most P x P cells", of=POOLED
    )
    tokens: Annotated[str, choice("auto", *TOKENS)] = setting(
        "auto",
        "WHICH",
        "of a transformer's blocks, what the head reads: mean (of all tokens), class (the class token), grid (patches, "
        "averaged to at most P x P cells) or auto (what is best on 500 training samples, each left out in turn)",
        of=POOLED,
    )
    centres: Count | None = setting(
        None,
        "N",
        "training rows, evenly spread, that all are compared with; default: all of at most 50 000 rows, of more 10 000",
        of=KERNEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        mlp = parse_mlp("head", self.head) is not None
        rule(mlp or self.head in ("last", "multi-level"), "head", self.head, "last, mlp, mlp-WxW... or multi-level")
        # Features of several blocks differ a hundredfold in size: no learning rate fits them all.
        fits = self.head != "multi-level" or self.solved
        rule(fits, "head", self.head, "last with --head-fit sgd", "pass --head-fit exact or kernel too")
        rule(not (mlp and self.solved), "head", self.head, "last or multi-level with --head-fit exact or kernel")

    @property
    def token_form(self) -> str:
        """One of `TOKENS`; the mean where nothing was chosen."""
        return "mean" if self.tokens == "auto" else self.tokens

    @property
    def solved(self) -> bool:
        """Whether the head is solved, not trained."""
        return self.head_fit != "sgd"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its schedule, and what the loss is; --lr and --weight-decay have a default for each optimizer."""

    epochs: Count = setting(
        10,
        "N",
        "passes over the training samples; in hvfreeze auto: at most work worth so many epochs of full fine-tuning",
        brief="work, in epochs of full fine-tuning",
        of=TRAINED,
    )
    batch_size: Count = setting(
        128,
        "N",
        "samples per rank and backward pass; hvfreeze auto chooses unless it is given",
        brief="samples per rank and step, if not chosen",
    )
    accumulate: Count = setting(
        1, "N", "batches per rank and step: N backward passes, one exchange of their mean", of=TRAINED
    )
    optimizer: Annotated[str, choice("sgd", "adamw", "lars", AUTO)] = setting(
        "sgd",
        "NAME",
        "sgd, adamw, or lars (SGD whose steps are in proportion to each tensor); hvfreeze auto chooses unless it is "
        "given",
        of=TRAINED,
    )
    lr: Positive = setting(
        By("optimizer", sgd=0.1, adamw=1e-3, lars=3.0, auto=AUTO_RATE),
        "LR",
        "learning rate, used as given for any number of ranks",
        of=(TRAINED, NAMED),
    )
    head_lr: str | None = setting(
        None,
        "LR",
        "the head's own learning rate; of several heads one for all or one each, as in 1,2",
        of=(TRAINED, NAMED),
    )
    momentum: Part = setting(0.9, "M", "of SGD and LARS; AdamW's first beta", of=TRAINED)
    nesterov: bool = setting(False, "", "Nesterov's momentum", of=(TRAINED, SGD))
    weight_decay: Decay = setting(
        By("optimizer", sgd=1e-4, adamw=1e-2, lars=1e-4, auto=1e-2), "WD", "weight decay", of=TRAINED
    )
    no_decay_norms: bool = setting(
        False, "", "no weight decay on biases and on what norms scale and shift by", of=TRAINED
    )
    clip_grad: Positive | None = setting(
        None,
        "NORM",
        "scale averaged gradients down to at most this norm; votes see them before, --signal averaged after",
        of=TRAINED,
    )
    label_smoothing: Part = setting(0.0, "E", "this part of each label is spread evenly over all classes", of=TRAINED)
    loss: Annotated[str, choice("huber", "squared")] = setting(
        "huber",
        "WHICH",
        "of numbers, standardised: huber (errors above 1 count less) or squared; solved heads have squared ones",
        of=(IMAGES, TRAINED),
    )
    class_weights: str = setting(
        "none",
        "HOW",
        "how much samples of a class count: none (all alike), balanced (the rarer the class, the more) or "
        "NAME=W,NAME=W,... (other classes 1; what counts is how weights compare)",
        brief="balanced: rare classes count more",
        of=IMAGES,
    )
    mixup: Mixup = setting(
        0.0,
        "ALPHA",
        "mix pairs of images and labels by a draw from Beta(ALPHA, ALPHA); behind a cut, the frozen blocks' output",
        of=(IMAGES, TRAINED),
    )
    schedule: Annotated[str, choice("constant", "step", "cosine")] = setting(
        "constant", "NAME", "constant, step (a tenth at 50 % and 75 %) or cosine", of=TRAINED
    )
    lr_warmup: Steps = setting(0, "STEPS", "steps over which the learning rate rises linearly to --lr", of=TRAINED)
    compression: str = setting(
        "none", "HOW", "of gradients: none, fp16, powersgd:R, or auto (what the network asks for)", of=TRAINED
    )
    precision: Annotated[str, choice("float32", "bfloat16")] = setting(
        "float32", "HOW", "float32, or bfloat16 (autocast; parameters stay float32)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_rates()
        rule(not self.nesterov or self.momentum > 0, "nesterov", True, "used with a --momentum above 0")
        parse_compression(self.compression)
        parse_class_weights(self.class_weights)

    def steps_per_epoch(self, batches: int) -> int:
        """Return the optimizer steps of an epoch of so many batches; the last may be of fewer than the others."""
        return -(-batches // self.accumulate)

    def head_rates(self) -> list[float] | None:
        """Return the learning rates that were given for heads, None where they all have --lr."""
        if self.head_lr is None:
            return None
        rates = number_list("head-lr", self.head_lr)
        ok = all(math.isfinite(rate) and rate > 0 for rate in rates)
        rule(ok, "head-lr", self.head_lr, "positive numbers separated by commas")
        return rates


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Where the run keeps its files, how it starts and what it starts from."""

    seed: Seed = setting(0, "SEED", "of the model's initialisation and dropout", brief="random seed")
    threads: Threads | None = setting(
        None,
        "N",
        "torch threads per rank; default: OMP_NUM_THREADS, else this rank's share of the cores",
        brief="torch threads per rank",
    )
    run_dir: str | None = setting(
        None, "DIR", "where the run's files go; default: runs/<time>-<name>", brief="where the files of the run go"
    )
    checkpoint_every: str = setting(
        "auto",
        "N",
        "epochs between checkpoints, or steps with the suffix s (200s); 0 is none; auto: at ends of epochs, as "
        "often as takes 3 % of the time",
        brief="epochs, or steps as in 200s",
    )
    evaluate_every: Annotated[int, at_least(1, "epoch")] = setting(
        1, "N", "epochs between evaluations; the last epoch and a solved head are always evaluated", of=TRAINED
    )
    keep: Annotated[str, choice("last", "best")] = setting(
        "last", "WHICH", "model to keep: last, or best on held-out samples (--validation-fraction)", of=TRAINED
    )
    metric: Annotated[str, choice(*dict.fromkeys(sum(METRICS.values(), ())))] | None = setting(
        None,
        "NAME",
        "by which models are compared on held-out samples, by hvfreeze auto, --keep best and --early-stop: accuracy, "
        "balanced-accuracy, macro-f1 or auroc of classes (default: accuracy, in hvfreeze auto the loss), "
        "average-precision (default) or macro-f1 of several labels, r2 (default) or mae of numbers",
        brief="held-out metric that decides, as macro-f1",
        of=IMAGES,
    )
    early_stop: Annotated[int, at_least(1, "evaluation")] | None = setting(
        None,
        "N",
        "stop when N evaluations in a row find no better model on held-out samples (--validation-fraction)",
        of=TRAINED,
    )
    time_budget: str = setting(
        "none",
        "TIME",
        "how long the run may take, as in 90s, 10m or 1h30m: steps are chosen for it, and --epochs does not count",
        brief="limit instead of --epochs: 90s, 10m, 1h30m",
    )
    resume: bool = setting(
        False,
        "",
        "go on from the newest checkpoint in --run-dir, with its settings; start where there is none",
        brief="continue the run in --run-dir",
    )
    resume_inexact: bool = setting(
        False,
        "",
        "with --resume: go on although threads, versions, processor or number of ranks changed, hence not bit for bit",
    )
    track: str = setting(
        "none", "LIST", f"report to experiment trackers too: {', '.join(TRACKERS)}", brief=", ".join(TRACKERS)
    )
    quiet: bool = setting(
        False, "", "say nothing but errors; log.txt in the run directory has the lines", brief="print errors only"
    )
    json: bool = setting(False, "", "print the summary as the last line", brief="print the summary as the last line")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A shell gives the empty path for a variable that is not set.
        object.__setattr__(self, "run_dir", self.run_dir or None)
        rule(not self.resume or self.run_dir is not None, "resume", True, "given together with --run-dir DIR")
        rule(not self.resume_inexact or self.resume, "resume-inexact", True, "given together with --resume")
        if self.checkpoint_every != "auto":
            parse_cadence(self.checkpoint_every)
        self.budget_seconds()
        self.trackers()

    def trackers(self) -> list[str]:
        """Return the names of the trackers that the run reports to."""
        return sorted(parse_parts("track", self.track, TRACKERS))

    def budget_seconds(self) -> float | None:
        """Return the seconds that the run may take, None for as long as --epochs makes it."""
        return parse_duration(self.time_budget)

    def checkpoint_cadence(self) -> tuple[int, str] | None:
        """Return how many `epochs` or `steps` lie between two checkpoints, 0: none; None where their cost decides."""
        return None if self.checkpoint_every == "auto" else parse_cadence(self.checkpoint_every)

    def evaluates(self, epoch: int) -> bool:
        """Tell whether epoch `epoch`, the first is 0, ends with an evaluation; the last one does in any case."""
        return (epoch + 1) % self.evaluate_every == 0
