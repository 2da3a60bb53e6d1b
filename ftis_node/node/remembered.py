"""What a home remembers of its training for the next start: model, LoRA layers, optimiser, port."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.config.consistency import by_a_person
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError
from ftis_node.fit.memory import trained_part
from ftis_node.policy.names import same_model
from ftis_node.store.checkpoints import Facts, labelled, newest_facts, parse_label
from ftis_node.store.home import Home
from ftis_node.worker.messages import ModelFacts

LAYERS = ("lora_rank", "lora_alpha", "lora_targets")
"""Settings of LoRA layers that a home keeps."""


def refuse_other_model(checkpoints: Path, theirs: str, ours: str) -> None:
    """Raise UsageError unless both labels name the same model, trained in the same way.

    Args:
        theirs: the checkpoint's label (`store.checkpoints.labelled`). ours: that of the present start.
    """
    of = parse_label(theirs)
    to = parse_label(ours)
    if theirs == ours:
        return
    if of is not None and to is not None and of[1] == to[1] and same_model(of[0], to[0]):
        return
    raise UsageError(
        f"The checkpoints in {checkpoints} are of another model, or trained otherwise: {theirs}, not {ours}.",
        "Use the model and --lora/--full of the first start, or a fresh --home.",
    )


def refuse_other_settings(checkpoints: Path, settings: Settings) -> None:
    """Raise UsageError if the newest checkpoint has another model than the settings, or was trained otherwise. Without
    one nothing is refused; `lora` left open agrees with both. Preflight calls it; the start itself checks more."""
    _, of = _begun(checkpoints)
    if of is not None:
        model, kind = of
        ours = kind
        if settings.lora is not None:
            ours = trained_part(settings.lora)
        refuse_other_model(checkpoints, labelled(model, kind), labelled(settings.model, ours))


def _begun(checkpoints: Path) -> tuple[Facts, tuple[str, str] | None]:
    """The facts of the newest checkpoint, and its model with the trained part of it; None if there is none."""
    facts: Facts = {}
    if checkpoints.is_dir():
        facts = newest_facts(checkpoints) or {}
    return facts, parse_label(facts.get("model"))


def facts_of(loaded: ModelFacts, model: str) -> Facts:
    """The facts by which a start knows whether, and with which settings, a checkpoint is its own.

    The names are those in manifests on disk. nf4 alone is written down: manifests without a quantisation mean "none".

    Args:
        loaded: what was loaded for it. model: its name, by which a later start finds it.
    """
    facts: Facts = {"model": labelled(model, loaded.kind), "optimiser": loaded.plan.optimiser}
    if loaded.plan.quantisation == "nf4":
        facts["quantisation"] = "nf4"
    if loaded.settings.lora:
        facts["layers"] = {name: getattr(loaded.settings, name) for name in LAYERS}
    return facts


def settled(checkpoints: Path, model: str) -> dict[str, bool | str]:
    """The settings that the newest checkpoint of `model` fixes: LoRA or not, the optimiser, quantised weights; by name.
    Empty without one, or if it is another model's, which is refused later."""
    facts, of = _begun(checkpoints)
    if of is None or not same_model(of[0], model):
        return {}
    return {
        "lora": of[1] == "lora",
        "optimiser": facts["optimiser"],
        "quantisation": facts.get("quantisation", "none"),
    }


def with_begun(home: Home, settings: Settings, origins: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """The settings with the newest checkpoint's model and LoRA layers if the owner names none, and their origins.

    Args:
        origins: by a setting's name where its value comes from, "default" for one that nobody set. What the home gives
            gets "home". Neither argument is changed.

    Raises:
        UsageError: the owner names other LoRA layers, or another quantisation, than the checkpoint was trained with.
    """
    facts, of = _begun(home.checkpoints)
    if of is None:
        return settings, dict(origins)
    if origins["model"] == "default":
        settings = settings.model_copy(update={"model": of[0]})
        origins = {**origins, "model": "home"}
    if of[1] != "lora" or settings.lora is False or not same_model(of[0], settings.model):
        return settings, dict(origins)  # what differs is refused later
    fixed: dict[str, Any] = {**facts.get("layers", {}), "quantisation": facts.get("quantisation", "none")}
    if "lora_targets" in fixed:
        fixed["lora_targets"] = tuple(fixed["lora_targets"])
    for name, theirs in fixed.items():
        ours = getattr(settings, name)
        if ours not in (None, theirs) and by_a_person(origins[name]):
            raise UsageError(
                f"The LoRA layers under {home.checkpoints} were trained with {name}={_as_text(theirs)}, "
                f"not {_as_text(ours)}.",
                f"Leave out {name}, which the home knows, or use a fresh --home.",
            )
    taken = {name: value for name, value in fixed.items() if name != "quantisation"}
    return settings.model_copy(update=taken), {**origins, **dict.fromkeys(taken, "home")}


def _as_text(value: object) -> str:
    """A setting's value as a person would type it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def recalled(home: Home, settings: Settings, origins: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """The settings with all of the home's values where the owner names none, and the origin of each setting: what
    `config show` prints. A start leaves port, optimiser and the like to its parts, which look into the home themselves.

    Args:
        settings, origins: as `with_begun` gives them, so with the home's model and LoRA layers.
    """
    port = home.last_port()
    if port and not settings.port and origins["port"] == "default":
        settings = settings.model_copy(update={"port": port})
        origins = {**origins, "port": "home"}
    kept = settled(home.checkpoints, settings.model)
    found = {key: value for key, value in kept.items() if getattr(settings, key) is None}
    return settings.model_copy(update=found), {**origins, **dict.fromkeys(found, "home")}
