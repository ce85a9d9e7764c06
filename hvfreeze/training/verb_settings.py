"""Derive the settings of verbs from the run's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvfreeze.config.freeze import AUTO
from hvfreeze.config.head import HeadConfig
from hvfreeze.config.optimizer import AUTO_DEFAULTS, OptimizerConfig
from hvfreeze.config.tree import SOLVED, Config


def for_head(config: Config) -> Config:
    """Return the settings for fitting the head: fixed views instead of fresh ones, no mixing, no parameter groups."""
    criterion, cut = SOLVED
    config = with_adamw(config)
    data = config.data if config.data.cacheable() else replace(config.data, augment="none", recipe="crop")
    return replace(
        config,
        data=data,
        optimizer=replace(config.optimizer, epochs=1, mixup=0.0, accumulate=1),
        freeze=replace(config.freeze, freeze=criterion, cut=cut, auto_without="none"),
    )


def for_network(config: Config) -> Config:
    """Return the settings for fine-tuning the model with its own last layer."""
    config, cut = with_adamw(config), config.freeze.cut or 0
    freeze = "coherence" if config.freeze.has("votes") else "static" if cut else "none"
    pretrained = config.model.weights != "none"
    return replace(
        config,
        # Training sees flips as separate samples.
        data=replace(config.data, flips="on") if config.data.flips == "mean" else config.data,
        head=HeadConfig(),
        freeze=replace(
            config.freeze,
            freeze=freeze,
            cut=cut or None,
            auto_without="none",
            # Batch statistics of this task would degrade features of pretrained weights.
            statistics="kept" if pretrained and config.freeze.statistics == AUTO else config.freeze.statistics,
        ),
        cache=config.cache if config.data.cacheable() else replace(config.cache, cache="off"),
    )


def with_adamw(config: Config) -> Config:
    """Return the settings with AdamW, if --optimizer does not choose; the settings already have its small rate."""
    settings = config.optimizer
    return replace(config, optimizer=replace(settings, optimizer="adamw")) if settings.optimizer == AUTO else config


def with_sgd(config: Config, rate: float) -> Config:
    """Return the settings with SGD and batch statistics, if --optimizer does not choose."""
    settings, freeze = config.optimizer, config.freeze
    if settings.optimizer != AUTO:
        return config
    decay = settings.weight_decay if "weight_decay" in config.given else OptimizerConfig().weight_decay
    sgd = replace(settings, optimizer="sgd", lr=rate, weight_decay=decay)
    statistics = "batch" if freeze.statistics == AUTO else freeze.statistics
    return replace(config, optimizer=sgd, freeze=replace(freeze, statistics=statistics))


def for_trial(config: Config, *, warmup: int) -> Config:
    """Return the settings of a trial: half the batch size, as steps matter more than samples, and no cosine decay."""
    settings = config.optimizer
    schedule = "constant" if settings.schedule == "cosine" else settings.schedule
    batch = max(2, settings.batch_size // 2)
    tried = replace(settings, batch_size=batch, accumulate=1, schedule=schedule)
    return replace(config, optimizer=replace(tried, lr_warmup=settings.lr_warmup or warmup))


def for_round(config: Config, batch: int, *, rate: float, warmup: int) -> Config:
    """Return the settings of a round with this batch size and `rate` times the learning rate."""
    settings = config.optimizer
    lasting = replace(settings, batch_size=batch, lr=rate * settings.lr, lr_warmup=settings.lr_warmup or warmup)
    return replace(config, optimizer=lasting)


def in_short(config: Config) -> str:
    """Return the optimizer, its learning rate and the batch size for a log line."""
    settings = config.optimizer
    return f"{settings.optimizer}, lr {settings.lr:g}, batch size {settings.batch_size}"


def with_flips(config: Config, found: str | None) -> Config:
    """Return the settings with the result of the flip trial, on or off, if --flips does not choose."""
    if found is None or config.data.flips != "auto":
        return config
    return replace(config, data=replace(config.data, flips=found))


def default(leaf: str) -> Any:
    """Return the default of a setting in hvfreeze auto."""
    return AUTO_DEFAULTS[leaf]
