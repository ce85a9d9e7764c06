"""The sections of a configuration: frozen dataclasses, checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from typing_extensions import Self

from hvfreeze.config.rules import (
    FITS,
    Must,
    at_least,
    between,
    check_bounds,
    choice,
    number_list,
    one_of,
    parse_bytes,
    parse_cadence,
    parse_channels,
    parse_colour,
    parse_compression,
    parse_dirichlet,
    parse_duration,
    parse_mlp,
    parse_parts,
    parse_recipe,
    parse_views,
    rule,
    setting,
    typed,
    types_of,
    weights_entry,
)
from hvfreeze.user_code import TIMM, check_named_code, is_named_code
from hvfreeze.wording import plural

Channels = tuple[float, float, float]
TEXT = "text"
DATA_SETS = ("digits", "cifar10", "cifar100", "imagefolder", TEXT)
TINY_LM = "tiny-lm"
"""The model for a text."""
TEXT_STRATEGIES = ("replicas", "local-sgd", "stale-ring")
"""Strategies that train on windows of a text."""
MOST_PIXELS = 4096
"""Side of an image."""
CONTEXT = 64
"""Characters of a window where --context is not given."""
CRITERIA = ("coherence", "gradient-norm", "percentile", "linear", "geometric")
"""What proposes a cut; `freezing/criteria.py` says how."""
AUTO = "auto"
"""A value of --freeze that is no criterion: fine-tunes while it pays and fits the head, see `training/auto`."""
AUTO_PARTS = ("votes", "guard", "last-solve")
VOTE_WEIGHTS = ("uniform", "samples", "loss", "coverage", "snr")
MOST_CELLS = 64
MOST_PARTS = 4096
MOST_THREADS = 4096

# Not in the classes: annotations are read late, and a lambda in one would not find what this module imports.
Count = Annotated[int, at_least(1)]
Steps = Annotated[int, at_least(0, "steps")]
Parts = Annotated[int, between(1, MOST_PARTS)]
Window = Annotated[int, Must(lambda size: 2 <= size <= 4096, "in 2..4096 characters")]
Seed = Annotated[int, Must(lambda seed: 0 <= seed < 2**63, "in 0..2^63-1")]
Threads = Annotated[int, Must(lambda count: 1 <= count <= MOST_THREADS, f"at least 1 and at most {MOST_THREADS}")]
Positive = Annotated[float, Must(lambda number: 0 < number < math.inf, "a positive number")]
Bound = Annotated[float, Must(lambda number: number > 0, "a positive number (inf for no bound)")]
Decay = Annotated[float, Must(lambda number: 0 <= number < math.inf, "0 or a positive number")]
Part = Annotated[float, Must(lambda part: 0 <= part < 1, "in [0, 1)")]
Quorum = Annotated[float, Must(lambda part: 0 < part <= 1, "in (0, 1]")]
Mixup = Annotated[float, Must(lambda alpha: 0 <= alpha <= 100, "in 0..100; 0.2 is usual, 0 is none")]


@dataclass(frozen=True, kw_only=True)
class Section:
    """Settings that belong together. Raises UsageError, whoever makes one, where a value is not as its type says."""

    def __post_init__(self) -> None:
        section: type = type(self)
        kinds, bounds = (types_of(section, include_extras=extras) for extras in (False, True))
        for leaf in fields(self):
            value = getattr(self, leaf.name)
            # None may stand for a default that depends on other settings.
            if value is not None or leaf.default is not None:
                known = typed(leaf.name, value, kinds[leaf.name], source=type(self).__name__)
                object.__setattr__(self, leaf.name, known)
                check_bounds(leaf.name, known, bounds[leaf.name])


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Which samples are trained on, who gets them and how they are augmented."""

    data: str = setting(
        "digits",
        "NAME",
        "digits, cifar10, cifar100, imagefolder, text, or package:function",
        by_strategy={"stale-ring": TEXT},
    )
    data_dir: str | None = setting(
        None,
        "DIR",
        "where the data lies; default $HVFREEZE_DATA or a cache directory, none with imagefolder; with --data text a "
        "file, default: the sources of Python's standard library",
        read_by="files",
        brief="where a built-in data set lies",
    )
    context: Window | None = setting(None, "N", f"with --data text: characters of a window; [{CONTEXT}]")
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
        "images that differ in size",
        brief="side in pixels; own size, or 128 if unequal",
    )
    fit: Annotated[str, choice(*FITS)] = setting(
        "crop",
        "HOW",
        "how images that are not square become it: crop (the centre square), squash (each side scaled by itself) or "
        "pad (a border of the colour --background)",
        read_by="oblong-images",
    )
    background: str = setting(
        "white",
        "COLOUR",
        "behind transparent parts of images and around images that are padded: white, black, or R,G,B in 0..255",
        read_by="background",
    )
    resize: int | None = setting(
        None,
        "PIXELS",
        "resize to this first; training crops --image-size out of it, evaluation takes the centre",
        read_by="larger-images",
    )
    mean: str | None = setting(
        None, "M", "normalise with this mean, one for all channels or three; default: the weights', else the data's"
    )
    std: str | None = setting(None, "S", "normalise with this standard deviation, given together with --mean")
    data_seed: int | None = setting(None, "SEED", "seed of subset, shards, order and views; default: --seed")
    shuffle: Annotated[str, choice("shard", "global")] = setting(
        "shard", "HOW", "shard (fixed shards, shuffled inside) or global (dealt out anew each epoch)", read_by="order"
    )
    partition: str = setting("iid", "HOW", "iid, or dirichlet:A for label skew between ranks", read_by="shards")
    shard_sizes: str = setting("equal", "HOW", "equal, or one relative size per rank, as in 3,1,1,1", read_by="shards")
    skip_bad: bool = setting(
        False,
        "",
        "leave out images that cannot be decoded, which are looked for before the start",
        read_by="decoding",
        brief="leave out images that cannot be decoded",
    )
    augment: str = setting(
        "fresh",
        "HOW",
        "fresh (new draws every epoch), none, or views:K (K fixed views of each sample)",
        read_by="views",
    )
    flips: Annotated[str, choice("auto", "on", "mean", "off")] = setting(
        "auto",
        "WHETHER",
        "mirror images among the views, and for a solved head beside every sample: on (unless the data set rules them "
        "out), mean (a solved head reads the mean of an image's features and its mirror image's; answers take twice "
        "as long), auto (on; in hvfreeze auto and more than 25 000 samples mean; off where training samples show "
        "that left and right differ) or off (they differ)",
        read_by="mirror-images",
        brief="horizontal flips: auto, on, mean or off",
    )

    recipe: str = setting(
        "crop",
        "LIST",
        "how views are made: crop (out of a black border) or random-resized-crop, with trivial-augment, color-jitter",
        read_by="drawn-views",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_named_code(self.data):
            check_named_code("data", self.data)
        else:
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
        self.background_colour()
        self.statistics()
        self._check_text()
        parse_views(self.augment)
        used = parse_recipe(self.recipe) == ("crop",) or self.augment != "none"
        rule(used, "recipe", self.recipe, "left out with --augment none, which shows every sample as it is")
        parse_dirichlet(self.partition)
        if self.shard_sizes != "equal":
            sizes = number_list("shard-sizes", self.shard_sizes)
            ok = all(math.isfinite(s) and s > 0 for s in sizes)
            rule(ok, "shard-sizes", self.shard_sizes, "equal, or one positive, finite number per rank")

    def _check_text(self) -> None:
        """Refuse what is for images with a text, and what is for a text with images."""
        text, context = self.data == TEXT, self.context
        rule(text or context is None, "context", context, f"left out unless --data is {TEXT}")
        for flag, value, usual in (
            ("image-size", self.image_size, None),
            ("resize", self.resize, None),
            ("fit", self.fit, "crop"),
            ("background", self.background, "white"),
            ("mean", self.mean, None),
            ("recipe", self.recipe, "crop"),
            ("skip-bad", self.skip_bad, False),
            ("partition", self.partition, "iid"),
        ):
            rule(not text or value == usual, flag, value, f"left out with --data {TEXT}", "it is for images")
        alone = self.validation_fraction == 0 or self.augment == "none"
        why = "other views of windows reach into those that are held out"
        rule(not text or alone, "augment", self.augment, "none with --data text and --validation-fraction", why)

    @property
    def window(self) -> int:
        """Characters of a text's window."""
        return self.context or CONTEXT

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
        "none, static, coherence (what gains nothing any more), gradient-norm, percentile, linear, geometric, or auto "
        "(try whether tuning pays, tune blocks while it does, solve a head)",
        read_by="freezing",
    )
    cut: Annotated[int, at_least(0, "blocks")] | None = setting(
        None,
        "K",
        "with --freeze static: the first K blocks are frozen; with auto: they are while the others are tuned",
        read_by="cut",
    )
    interval: Annotated[int, at_least(1, "step")] | None = setting(
        None, "STEPS", "steps between votes; default: half an epoch", read_by="cadence"
    )
    freeze_warmup: Steps | None = setting(
        None, "STEPS", "steps before the first vote; default: one epoch", read_by="cadence"
    )
    patience: Count = setting(
        1,
        "N",
        "a rank proposes what its criterion wanted in N intervals in a row; coherence: in 2 at least",
        read_by="criteria",
    )
    eta_max: Bound = setting(
        0.2, "ETA", "a block whose gradient norm changes faster is not frozen", read_by="gradients"
    )
    min_gain: Positive = setting(
        0.02,
        "X",
        "with coherence: freeze blocks that gain less than X of what their part of a step's time would",
        read_by="gains",
    )
    statistics: Annotated[str, choice("auto", "batch", "kept")] = setting(
        "auto",
        "WHICH",
        "that BatchNorm uses in blocks that train: batch (each batch's), kept (the weights'), or auto (kept with "
        "hvfreeze auto, --weights and an --optimizer or --lr of your own, else batch)",
        read_by="steps norms",
    )
    signal: Annotated[str, choice("local", "averaged")] = setting(
        "local",
        "WHICH",
        "gradients that the criterion sees: local (each rank's own) or averaged (no real vote)",
        read_by="observed",
    )
    vote_weight: str = setting(
        "uniform", "HOW", "uniform, samples, loss, coverage, snr, or one number per rank", read_by="criteria voters"
    )
    quorum: Quorum = setting(
        0.5, "Q", "part of the weight that must support a cut, in (0, 1]", read_by="criteria voters"
    )
    shadow: str = setting("none", "LIST", "criteria that are scored and logged without effect", read_by="shadows")
    auto_without: str = setting(
        "none",
        "LIST",
        "in hvfreeze auto: leave out votes, guard (keep what is best on held-out samples), last-solve",
        read_by="tuning",
    )

    def __new__(cls, **given: Any) -> Self:
        """Remember which settings were given, whatever their values."""
        new = super().__new__(cls)
        object.__setattr__(new, "_given", frozenset(given))
        return new

    def __post_init__(self) -> None:
        super().__post_init__()
        static = self.freeze == "static"
        # A criterion's own settings may start at a cut, where blocks are tuned; users give it with static and auto.
        starts = self.freeze != "none" or self.cut is None
        rule(starts, "cut", self.cut, "left out unless --freeze is static, or in hvfreeze auto")
        rule(not static or self.cut is not None, "freeze", self.freeze, "given together with --cut K")
        own = self.signal == "local" or self.freeze != "coherence"
        rule(own, "signal", self.signal, "local with --freeze coherence, which compares the ranks' gradients")
        if self.vote_weight not in VOTE_WEIGHTS:
            weights = number_list("vote-weight", self.vote_weight, also=", ".join(VOTE_WEIGHTS))
            ok = all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
            rule(ok, "vote-weight", self.vote_weight, "finite numbers, none negative, not all 0")
        for name in self.shadow_names():
            rule(name in CRITERIA, "shadow", name, "none or a list out of " + ", ".join(CRITERIA))
        without = self.auto_without
        rule(self.auto or without == "none", "auto-without", without, "left out unless --freeze is auto")
        parse_parts("auto-without", without, AUTO_PARTS)

    def of_script(self) -> FreezeConfig:
        """Return these settings with a training script's default: coherence, where only other settings were given.

        Raises:
            UsageError: they are settings of another criterion, which must then be named.
        """
        given: frozenset[str] = vars(self)["_given"]
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
        read_by="cached-rows",
        brief="store features: off, auto or on",
    )
    cache_dir: str | None = setting(
        None,
        "DIR",
        "where its files stay after the run; default: the run directory",
        read_by="cache cached-rows",
        brief="where they stay after the run",
    )
    cache_dtype: Annotated[str, choice("native", "float16", "bfloat16")] = setting(
        "native", "TYPE", "native (exact), float16 or bfloat16", read_by="cache cached-rows"
    )
    cache_limit: str = setting(
        "none", "SIZE", "disk space over all ranks, as in 20G; default: none", read_by="cache cached-rows"
    )
    cache_shared: bool = setting(
        False,
        "",
        "ranks may read each other's files on a shared file system; files of other users and groups are trusted",
        read_by="cache cached-rows sharing",
    )
    cache_failure: Annotated[str, choice("recompute", "stop")] = setting(
        "recompute",
        "HOW",
        "on a full disk or a damaged file: recompute (go on without it) or stop",
        read_by="cache cached-rows",
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
        "--data text, timm:NAME, or package:function for your own",
        by_strategy={"local-critics": "resnet20", "stale-ring": TINY_LM, "subnets": "mlp"},
        brief="network: resnet18, timm:NAME, package:function",
    )
    blocks: str = setting(
        "auto",
        "HOW",
        "where it may be cut: stage, residual, paper or NAME,NAME,...; auto: residual for --strategy grid and "
        "local-critics, else stage",
        read_by="cuts",
    )
    weights: str = setting(
        "none",
        "FILE",
        "none, DEFAULT or another of torchvision's names such as IMAGENET1K_V2 (downloaded), a URL, or a file with a "
        "state_dict, also as safetensors",
        brief="DEFAULT (downloaded), a URL or a file",
    )
    reset_head: bool = setting(
        False,
        "",
        "start the head afresh, also where the weights have one of as many classes",
        read_by="trained-weights steps",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule(bool(self.model), "model", repr(self.model), "the name of a classification model")
        parse_mlp("model", self.model)
        if is_named_code(self.model):
            check_named_code("model", self.model)
            own = weights_entry(self.weights) is None
            rule(own, "weights", self.weights, "none or a file with a model of your own")
        timms = not self.model.startswith(TIMM) or weights_entry(self.weights) in (None, ("", "DEFAULT"))
        rule(timms, "weights", self.weights, "none, DEFAULT or a file with a model of timm's")
        rule(bool(self.blocks), "blocks", repr(self.blocks), "auto, stage, residual, paper or NAME,NAME,...")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Section):
    """The head: what it reads, and whether it is trained with the rest or solved on frozen blocks."""

    head: str = setting(
        "last",
        "WHICH",
        "last (the model's own), mlp or mlp-WxW... (hidden layers of W neurons in its place) or multi-level (reads "
        "every block)",
        auto="multi-level",
    )
    head_fit: Annotated[str, choice("sgd", "exact", "kernel")] = setting(
        "sgd",
        "HOW",
        "sgd (trained with the rest), or, all blocks frozen, solved by all ranks: exact (logistic regression), kernel "
        "(likeness to every training sample)",
        auto="kernel",
    )
    pool: Annotated[int, between(1, MOST_CELLS)] = setting(
        4, "P", "with --head multi-level: each block's map is averaged to at most P x P cells", read_by="multi-level"
    )
    centres: Count | None = setting(
        None,
        "N",
        "with --head-fit kernel: training rows, evenly spread, that all are compared with; default: all of at most "
        "50 000 rows, of more 10 000",
        read_by="kernel",
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
    def solved(self) -> bool:
        """Whether the head is solved, not trained."""
        return self.head_fit != "sgd"


LEARNING_RATES = {"sgd": 0.1, "adamw": 1e-3, "lars": 3.0, AUTO: 3e-4}
"""--optimizer -> --lr where none is given; that of auto is AdamW's, for weights that serve the task."""
WEIGHT_DECAYS = {"sgd": 1e-4, "adamw": 1e-2, "lars": 1e-4, AUTO: 1e-2}
"""--optimizer -> --weight-decay where none is given. AdamW's is apart from the gradient; the number is PyTorch's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its schedule, and what the loss is; --lr and --weight-decay have a default for each optimizer."""

    epochs: Count = setting(
        10,
        "N",
        "passes over the training samples; in hvfreeze auto: at most work worth so many epochs of full fine-tuning",
        auto=16,
        by_strategy={"stale-ring": 1},
        read_by="epochs",
        brief="work, in epochs of full fine-tuning",
    )
    batch_size: Count = setting(
        128,
        "N",
        "samples per rank and backward pass; in hvfreeze auto 32 lets it choose",
        auto=32,
        by_strategy={"stale-ring": 32},
        brief="samples per rank and step, if not chosen",
    )
    accumulate: Count = setting(
        1, "N", "batches per rank and step: N backward passes, one exchange of their mean", read_by="steps"
    )
    optimizer: Annotated[str, choice(*LEARNING_RATES)] = setting(
        "sgd",
        "NAME",
        "sgd, adamw, or lars (SGD whose steps are in proportion to each tensor); in hvfreeze auto also auto: sgd at "
        "0.05 for networks with BatchNorm, adamw at 0.0003 for others",
        auto=AUTO,
        by_strategy={"stale-ring": "adamw"},
        read_by="steps",
        brief="sgd, adamw or lars, if not chosen",
    )
    lr: Positive = setting(
        None,
        "LR",
        "learning rate, used as given for any number of ranks; default: 0.1, with adamw 0.001, with lars 3; with "
        "hvfreeze auto adamw's, with which a rate that is given alone tunes",
        auto=LEARNING_RATES[AUTO],
        read_by="steps",
        brief="learning rate, if not chosen",
    )
    head_lr: str | None = setting(
        None,
        "LR",
        "the head's own learning rate; with shared-trunk's several heads one for all or one each, as in 1,2",
        read_by="steps",
    )
    momentum: Part = setting(
        0.9, "M", "of SGD and LARS; AdamW's first beta", by_strategy={"subnets": 0.0}, read_by="steps"
    )
    nesterov: bool = setting(False, "", "with sgd: Nesterov's momentum", read_by="steps")
    weight_decay: Decay = setting(None, "WD", "weight decay; default: 0.0001, with adamw 0.01", read_by="steps")
    no_decay_norms: bool = setting(
        False, "", "no weight decay on biases and on what norms scale and shift by", read_by="steps decay"
    )
    clip_grad: Positive | None = setting(
        None,
        "NORM",
        "scale averaged gradients down to at most this norm; votes see them before, --signal averaged after",
        read_by="steps",
    )
    label_smoothing: Part = setting(
        0.0, "E", "this part of each label is spread evenly over all classes", read_by="steps"
    )
    mixup: Mixup = setting(
        0.0,
        "ALPHA",
        "mix pairs of images and labels by a draw from Beta(ALPHA, ALPHA); behind a cut, the frozen blocks' output",
        read_by="steps",
    )
    schedule: Annotated[str, choice("constant", "step", "cosine")] = setting(
        "constant", "NAME", "constant, step (a tenth at 50 % and 75 %) or cosine", auto="cosine", read_by="steps"
    )
    lr_warmup: Steps = setting(
        0, "STEPS", "steps over which the learning rate rises linearly to --lr", read_by="steps warmup"
    )
    compression: str = setting(
        "none",
        "HOW",
        "of gradients: none, fp16, powersgd:R, or auto (what the network asks for)",
        read_by="steps exchange",
    )
    precision: Annotated[str, choice("float32", "bfloat16")] = setting(
        "float32", "HOW", "float32, or bfloat16 (autocast; parameters stay float32)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill_in("lr", LEARNING_RATES)
        self._fill_in("weight_decay", WEIGHT_DECAYS)
        self.head_rates()
        nesterov_ok = not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0)
        rule(nesterov_ok, "nesterov", True, "used with --optimizer sgd and a --momentum above 0")
        parse_compression(self.compression)

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

    def _fill_in(self, leaf: str, defaults: dict[str, float]) -> None:
        if getattr(self, leaf) is None:
            object.__setattr__(self, leaf, defaults[self.optimizer])


STRATEGIES = ("replicas", "shared-trunk", "grid", "local-sgd", "local-critics", "stale-ring", "subnets")
OWN_FLAGS = {
    "replicas": (),
    "shared-trunk": ("heads", "tasks", "head_blocks", "labels", "trunk", "cut_by", "cut_at"),
    "grid": ("parts", "replicas", "micro_batches", "pipeline", "redeal", "cut_by", "cut_at"),
    "local-sgd": ("local_steps",),
    "local-critics": ("parts", "critic_every", "critic_lr", "cut_by", "cut_at"),
    "stale-ring": ("parts", "stale_after", "tied_gradient", "cut_by", "cut_at"),
    "subnets": ("local_steps",),
}
"""The flags that only some strategies know. Their defaults are None, so that one is seen to be given."""


LOCAL_STEPS = 10
"""Where --local-steps is not given."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """Which rank runs which blocks, and what ranks exchange."""

    strategy: Annotated[str, choice(*STRATEGIES)] = setting(
        "replicas",
        "NAME",
        "replicas (every rank has the whole model and a shard of the data), shared-trunk (several models on one "
        "frozen trunk that lies on all ranks), grid (one model cut over ranks, in several replicas), local-sgd "
        "(replicas that train alone for some steps, then take their mean), local-critics (layer groups that update "
        "at once, by the loss that critics behind them predict), stale-ring (one model cut over a ring of ranks, "
        "whose gradients are some steps old) or subnets (the neurons of an MLP are dealt to the ranks, which train "
        "theirs alone for some steps)",
    )
    heads: Annotated[int, between(1, 4096)] | None = setting(
        None, "N", "shared-trunk: models, each with a head on the data's own labels; default: one per rank"
    )
    tasks: str | None = setting(
        None, "FILE", "shared-trunk: one model a task instead; a CSV of labels, or YAML that says more"
    )
    head_blocks: Count | None = setting(
        None, "K", "shared-trunk: the last K blocks are each model's own; default: 1, a linear head"
    )
    labels: Annotated[str, choice("ride", "direct", "replay")] | None = setting(
        None,
        "HOW",
        "shared-trunk: ride (with the activations), direct (from rank 0) or replay (each rank's own); [replay]",
        read_by="line",
    )
    trunk: Annotated[str, choice("split", "whole")] | None = setting(
        None,
        "HOW",
        "shared-trunk: split (over the ranks), or whole (each rank runs all of it: the baseline); [split]",
        read_by="ranks",
    )
    cut_by: Annotated[str, choice("compute", "params", "count", "given")] | None = setting(
        None,
        "HOW",
        "shared-trunk, grid, local-critics, stale-ring: what segments share evenly: compute, params, count, or given "
        "with --cut-at; [compute]",
        read_by="line",
    )
    cut_at: str | None = setting(
        None, "LIST", "with --cut-by given: the blocks at which segments begin, as in 2,4", read_by="line"
    )

    parts: Parts | None = setting(
        None,
        "P",
        "grid: ranks over which the model is cut; default: all ranks, or those that --replicas leaves to each; "
        "local-critics: layer groups, on as many ranks or fewer; default: 4; stale-ring: modules, one more than ranks",
        read_by="parts",
    )
    replicas: Parts | None = setting(
        None, "R", "grid: copies of the model, each on --parts ranks; default: 1", read_by="parts"
    )
    micro_batches: Parts | None = setting(
        None, "M", "grid: parts of a batch that follow each other through the model; default: 2 a part, 1 with one part"
    )
    pipeline: Annotated[str, choice("fill-drain", "1f1b")] | None = setting(
        None,
        "HOW",
        "grid: fill-drain (all forwards first) or 1f1b (fewest activations kept), the same bits; [1f1b]",
        read_by="line",
    )
    redeal: Annotated[str, choice("on", "off")] | None = setting(
        None,
        "HOW",
        "grid: on (ranks whose blocks are all frozen, or cached, become further lines of the rest) or off (they wait); "
        "[off]",
        read_by="line redealing",
    )
    stale_after: Steps | None = setting(
        None, "STEPS", "stale-ring: steps at the start whose gradients are all new; default: a tenth of an epoch"
    )
    tied_gradient: Annotated[str, choice("sum", "half")] | None = setting(
        None, "HOW", "stale-ring: of parameters that both ends use, the gradients' sum or half of it; [sum]"
    )
    critic_every: Count | None = setting(None, "K", "local-critics: critics learn from every K-th batch; default: 1")
    critic_lr: Positive | None = setting(
        None, "LR", "local-critics: learning rate of the critics' Adam; default: 0.0003"
    )

    local_steps: Annotated[int, between(1, 2**31 - 1)] | None = setting(
        None, "J", "local-sgd, subnets: optimizer steps that a rank makes alone in a round; [10]", read_by="rounds"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in {flag for flags in OWN_FLAGS.values() for flag in flags}:
            self._belongs(flag, getattr(self, flag))
        alone = self.heads is None or self.tasks is None
        rule(alone, "heads", self.heads, "left out with --tasks, which names the models")
        together = (self.cut_by == "given") == (self.cut_at is not None)
        rule(together, "cut-at", self.cut_at, "given together with --cut-by given, and only then")
        self.starts()

    def starts(self) -> list[int]:
        """Return the blocks at which segments begin, but for the first."""
        if self.cut_at is None:
            return []
        starts = number_list("cut-at", self.cut_at)
        rule(all(start == start // 1 for start in starts), "cut-at", self.cut_at, "whole numbers separated by commas")
        return [int(start) for start in starts]

    def grid_parts(self, ranks: int) -> int:
        """Return over how many of `ranks` ranks --strategy grid cuts the model.

        Raises:
            UsageError: --parts and --replicas do not make up the number of ranks.
        """
        parts = self.parts or max(1, ranks // (self.replicas or 1))
        replicas = self.replicas or max(1, ranks // parts)
        rule(
            parts * replicas == ranks,
            "parts",
            parts,
            f"such that --parts x --replicas ({parts} x {replicas}) is the number of ranks ({ranks})",
            f"start {plural(parts * replicas, 'rank')}, or leave one of the two out",
        )
        return parts

    def ring_parts(self, ranks: int) -> int:
        """Return into how many modules --strategy stale-ring cuts the model.

        Raises:
            UsageError: --parts does not fit the number of ranks.
        """
        parts = ranks + 1 if self.parts is None else self.parts
        start = plural(max(1, parts - 1), "rank")
        why = f"the first and the last module share a rank; start {start}, or leave it out"
        rule(parts == ranks + 1, "parts", parts, f"one more than the number of ranks ({ranks})", why)
        return parts

    @property
    def steps_alone(self) -> int:
        """Optimizer steps that a rank makes in a round, without the others."""
        return self.local_steps or LOCAL_STEPS

    @property
    def redeals(self) -> bool:
        """Whether the ranks of a grid are dealt out anew when its front freezes."""
        return self.redeal == "on"

    def _belongs(self, flag: str, value: Any) -> None:
        owners = [name for name, flags in OWN_FLAGS.items() if flag in flags]
        wanted = f"used with --strategy {' or '.join(owners)} only"
        rule(value is None or self.strategy in owners, flag.replace("_", "-"), value, wanted)


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
        1,
        "N",
        "epochs between evaluations; the last epoch and a solved head are always evaluated",
        auto=1000,
        read_by="optional-evaluations",
    )
    keep: Annotated[str, choice("last", "best")] = setting(
        "last",
        "WHICH",
        "model to keep: last, or best on held-out samples (--validation-fraction)",
        read_by="evaluations",
    )
    early_stop: Annotated[int, at_least(1, "evaluation")] | None = setting(
        None,
        "N",
        "stop when N evaluations in a row find no better model on held-out samples (--validation-fraction)",
        read_by="evaluations patience",
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
    tensorboard: bool = setting(False, "", "write event files for TensorBoard into the run directory too")
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

    def budget_seconds(self) -> float | None:
        """Return the seconds that the run may take, None for as long as --epochs makes it."""
        return parse_duration(self.time_budget)

    def checkpoint_cadence(self) -> tuple[int, str] | None:
        """Return how many `epochs` or `steps` lie between two checkpoints, 0: none; None where their cost decides."""
        return None if self.checkpoint_every == "auto" else parse_cadence(self.checkpoint_every)

    def evaluates(self, epoch: int) -> bool:
        """Tell whether epoch `epoch`, the first is 0, ends with an evaluation; the last one does in any case."""
        return (epoch + 1) % self.evaluate_every == 0
