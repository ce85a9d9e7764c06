"""A wrong command line gets a line that says what to type."""

from __future__ import annotations

import pytest

from hvfreeze.cli import parse
from hvfreeze.config.flags import configuration
from hvfreeze.errors import UsageError

WRONG = {
    # a word that is not known
    "trian": "did you mean 'train'?",
    "autos digits": "did you mean 'auto'?",
    "train --epoch 2": "did you mean '--epochs'?",
    "train --learning-rate 0.1": "unknown argument '--learning-rate'",
    "train --wieghts DEFAULT": "did you mean '--weights'?",
    "train --mirror off": "it is --flips now",
    "auto digits --mirror off": "it is --flips now",
    "train --batchsize 8": "did you mean '--batch-size'?",
    "auto digits --epoch 2": "did you mean '--epochs'?",
    "auto digits --parts 2": "it is a flag of hvfreeze train",
    "auto digits --keep best": "it is a flag of hvfreeze train",
    "auto digits --freeze none": "it is a flag of hvfreeze train",
    "auto digits more": "unknown argument 'more'",
    "auto": "type hvfreeze auto DIR",
    "auto --epochs 3": "type hvfreeze auto DIR",
    "auto digit": "DATA (digit) does not exist; did you mean 'digits'?",
    "auto photos --data-dir photos": "--data-dir (photos) must be left out",
    # another command
    "train --freeze auto": "type: hvfreeze auto digits",
    "train --data imagefolder --data-dir my --freeze auto --weights DEFAULT": "hvfreeze auto my --weights DEFAULT",
    "train --freeze auto --data cifar10 --seed 3": "type: hvfreeze auto cifar10 --seed 3",
    # values out of range
    "train --lr -1": "--lr (-1.0) must be a positive number",
    "train --lr nan": "--lr (nan) must be a positive number",
    "train --lr fast": "invalid float value: 'fast'",
    "train --epochs 0": "--epochs (0) must be at least 1",
    "train --epochs 1.5": "invalid int value: '1.5'",
    "train --epochs": "expected one argument",
    "train --momentum 1": "--momentum (1.0) must be in [0, 1)",
    "train --optimizer adam": "--optimizer (adam) must be one of sgd, adamw, lars",
    "train --strategy grids": "--strategy (grids) must be one of replicas, shared-trunk, grid",
    "train --freeze often": "--freeze (often) must be one of none, static, coherence",
    "train --seed -1": "--seed (-1) must be in 0..2^63-1",
    "train --augment views:0": "--augment (views:0) must be fresh, none or views:K",
    "train --time-budget soon": "--time-budget (soon) must be none or a time above 0 such as 90s",
    "train --image-size 0": "--image-size (0) must be in 1..4096",
    "train --cache maybe": "--cache (maybe) must be one of off, auto, on",
    "train --strategy shared-trunk --heads 0": "--heads (0) must be in 1..4096",
    "train --strategy shared-trunk --head-blocks 0": "--head-blocks (0) must be at least 1",
    "train --strategy shared-trunk --labels carry": "--labels (carry) must be one of ride",
    "train --strategy shared-trunk --cut-by given --cut-at 1.5": "--cut-at (1.5) must be whole numbers",
    "train --strategy shared-trunk --cut-by given --cut-at inf": "--cut-at (inf) must be whole numbers",
    "train --strategy local-critics --critic-every 0": "--critic-every (0) must be at least 1",
    "train --strategy local-critics --critic-lr 0": "--critic-lr (0.0) must be a positive number",
    "train --strategy grid --pipeline 2f2b": "--pipeline (2f2b) must be one of fill-drain, 1f1b",
    "train --strategy grid --micro-batches 0": "--micro-batches (0) must be in 1..4096",
    "train --head all": "--head (all) must be last, mlp",
    "train --head-fit newton": "--head-fit (newton) must be one of sgd, exact, kernel",
    "train --head multi-level --head-fit exact --augment none --pool 0": "--pool (0) must be in 1..64",
    "train --flips never": "--flips (never) must be one of auto, on, mean, off",
    "train --optimizer auto": "--optimizer (auto) must be sgd, adamw or lars",
    "auto digits --auto-without tuning": "--auto-without (tuning) must be none or a list out of votes, guard",
    # a flag of a choice that was not made
    "train --parts 2": "--parts is unknown here: it belongs to --strategy grid or local-critics or stale-ring",
    "train --strategy grid --heads 2": "--heads is unknown here: it belongs to --strategy shared-trunk",
    "train --strategy local-sgd --stale-after 3": "--stale-after is unknown here: it belongs to --strategy stale-ring",
    "train --strategy grid --local-steps 3": "it belongs to --strategy local-sgd or subnets",
    "train --cut 2": "--cut is unknown here: it belongs to --freeze static",
    "train --freeze linear --cut 2": "--cut is unknown here: it belongs to --freeze static",
    "train --interval 5": "--interval is unknown here: it belongs to --freeze coherence",
    "train --freeze linear --eta-max 0.2": "--eta-max is unknown here: it belongs to --freeze gradient-norm",
    "train --freeze percentile --min-gain 0.02": "--min-gain is unknown here: it belongs to --freeze coherence",
    "train --cache-dir rows": "--cache-dir is unknown here: it belongs to --cache auto or on",
    "train --pool 4": "--pool is unknown here: it belongs to --head multi-level",
    "train --optimizer adamw --nesterov": "--nesterov is unknown here: it belongs to --optimizer sgd",
    "train --head-fit exact --augment none --lr 0.1": "--lr is unknown here: it belongs to --head-fit sgd",
    "train --context 8": "--context is unknown here: it belongs to --data text",
    "train --data text --model tiny-lm --image-size 32": "--image-size is unknown here: it belongs to --data of images",
    "train --auto-without votes": "--auto-without is unknown here: it belongs to hvfreeze auto",
    "auto digits --optimizer auto --lr 0.0003": "--lr is unknown here: it belongs to a named --optimizer",
    "auto digits --eta-max 0.2": "--eta-max is unknown here: it belongs to --freeze gradient-norm or percentile",
    "train --cut-by params": "--cut-by is unknown here: it belongs to --strategy shared-trunk or grid",
    "train --strategy grid --critic-every 2": "it belongs to --strategy local-critics",
    "train --strategy shared-trunk --cut-at 2": "--cut-at is unknown here: it belongs to --cut-by given",
    "train --pipeline 1f1b": "--pipeline is unknown here: it belongs to --strategy grid",
    "auto digits --optimizer auto --head-lr 0.1": "--head-lr is unknown here: it belongs to a named --optimizer",
    # two that exclude each other, or belong together
    "train --cache on": "--cache (on) must be used with --augment none or views:K",
    "train --freeze static": "--freeze (static) must be given together with --cut K",
    "train --resume": "--resume (True) must be given together with --run-dir DIR",
    "train --keep best": "--keep is unknown here: it belongs to --validation-fraction F",
    "train --resume-inexact": "--resume-inexact is unknown here: it belongs to --resume",
    "train --strategy shared-trunk --freeze linear": "--freeze (linear) must be left out with --strategy shared-trunk",
    "train --strategy stale-ring --mixup 0.2": "--mixup (0.2) must be left out with --strategy stale-ring",
    "train --strategy local-critics --accumulate 2": "--accumulate (2) must be left out with --strategy local-critics",
    "train --strategy shared-trunk --heads 2 --tasks a.csv": "--heads (2) must be left out with --tasks",
    "train --strategy grid --cut-by given": "--cut-at (None) must be given together with --cut-by given",
    "train --head multi-level": "pass --head-fit exact or kernel too",
    "train --strategy shared-trunk --tasks a.csv --head-lr 0.1": "--head-lr (0.1) must be left out",
    "train --head-fit kernel --augment none": "--head (last) must be multi-level with --head-fit kernel",
    "train --head-fit exact": "--augment (fresh) must be none or views:K with --head-fit exact or kernel",
    "train --head-fit exact --augment none --freeze linear": "--freeze (linear) must be left out with --head-fit exact",
    "train --head-fit exact --augment none --freeze static --cut 3": "--freeze (static) must be left out with",
    "train --freeze linear --shadow linear": "--shadow (linear) must be another criterion than linear",
    "auto digits --head last --head-fit sgd": "--head-fit (sgd) must be exact or kernel in hvfreeze auto",
    "train --data imagefolder": "given together with --data-dir DIR",
}


@pytest.mark.parametrize(("line", "words"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_command_line_gets_a_line_that_says_what_to_type(line: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        configuration(parse(line.split()))
    assert words in str(refusal.value) and "\n" not in str(refusal.value), refusal.value
