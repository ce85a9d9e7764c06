"""The settings that verbs are called with, made from the run's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvfreeze.config.tree import SOLVED, Config
from hvfreeze.freezing.settings import AUTO
from hvfreeze.heads.settings import HeadConfig
from hvfreeze.training.settings import AUTO_DEFAULTS, OptimizerConfig


def solving(config: Config) -> Config:
    """Return the settings with which the head is fitted: fixed views for fresh draws, no pairs, no groups."""
    criterion, cut = SOLVED
    config = with_adamw(config)
    data = config.data if config.data.cacheable() else replace(config.data, augment="none", recipe="crop")
    return replace(
        config,
        data=data,
        optimizer=replace(config.optimizer, epochs=1, mixup=0.0, accumulate=1),
        freeze=replace(config.freeze, freeze=criterion, cut=cut, auto_without="none"),
    )


def tuning(config: Config) -> Config:
    """Return the settings with which the model is fine-tuned, under its own last layer."""
    config, cut = with_adamw(config), config.freeze.cut or 0
    freeze = "coherence" if config.freeze.has("votes") else "static" if cut else "none"
    pretrained = config.model.weights != "none"
    return replace(
        config,
        # Blocks that learn see flips one by one.
        data=replace(config.data, flips="on") if config.data.flips == "mean" else config.data,
        head=HeadConfig(),
        freeze=replace(
            config.freeze,
            freeze=freeze,
            cut=cut or None,
            auto_without="none",
            # Statistics of this task's batches would spoil features whose weights were trained with others.
            statistics="kept" if pretrained and config.freeze.statistics == AUTO else config.freeze.statistics,
        ),
        cache=config.cache if config.data.cacheable() else replace(config.cache, cache="off"),
    )


def with_adamw(config: Config) -> Config:
    """Return the settings with AdamW where --optimizer leaves that open; with it a small rate, which stands already."""
    settings = config.optimizer
    return replace(config, optimizer=replace(settings, optimizer="adamw")) if settings.optimizer == AUTO else config


def with_sgd(config: Config, rate: float) -> Config:
    """Return the settings with SGD and each batch's statistics where --optimizer leaves that open."""
    settings, freeze = config.optimizer, config.freeze
    if settings.optimizer != AUTO:
        return config
    decay = settings.weight_decay if "weight_decay" in config.given else OptimizerConfig().weight_decay
    sgd = replace(settings, optimizer="sgd", lr=rate, weight_decay=decay)
    statistics = "batch" if freeze.statistics == AUTO else freeze.statistics
    return replace(config, optimizer=sgd, freeze=replace(freeze, statistics=statistics))


def for_trial(config: Config, *, warmup: int) -> Config:
    """Return the settings of a trial: half batches, for steps count and not samples; no decay, for it is continued."""
    settings = config.optimizer
    schedule = "constant" if settings.schedule == "cosine" else settings.schedule
    batch = max(2, settings.batch_size // 2)
    tried = replace(settings, batch_size=batch, accumulate=1, schedule=schedule)
    return replace(config, optimizer=replace(tried, lr_warmup=settings.lr_warmup or warmup))


def for_round(config: Config, batch: int, *, rate: float, warmup: int) -> Config:
    """Return the settings of a round in batches of this size, at `rate` times the rate."""
    settings = config.optimizer
    lasting = replace(settings, batch_size=batch, lr=rate * settings.lr, lr_warmup=settings.lr_warmup or warmup)
    return replace(config, optimizer=lasting)


def with_flips(config: Config, found: str | None) -> Config:
    """Return the settings with what was found out about horizontal flips, on or off, where --flips leaves it open."""
    if found is None or config.data.flips != "auto":
        return config
    return replace(config, data=replace(config.data, flips=found))


def default(leaf: str) -> Any:
    """Return what a setting is in hvfreeze auto where it is not given."""
    return AUTO_DEFAULTS[leaf]
