"""Decides if a worker fits those that are registered already. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Role, WorkerKey


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker as the router knows it."""

    info: WorkerInfo
    address: str  # host:port of its own server; empty = it has joined, and nobody calls it
    tokenizer: TokenizerFiles | None  # of a verifier; a drafter's is known by its hash alone
    join_address: str = ""  # of a verifier, where drafters that joined reach it; empty = they do not

    @property
    def key(self) -> WorkerKey:
        return self.info.identity.key


def incompatibility(newcomer: Registration, verifiers: Iterable[Registration]) -> str | None:
    """Returns a sentence that says why `newcomer` cannot work with `verifiers`, or None.

    A verifier must run a model that can be served, the same as every other of its name, and by no name that
    another model has; a drafter must have the tokenizer of a served model, or no tokenizer, and fits while no
    model is served.
    """
    others = [one for one in verifiers if one.key != newcomer.key]
    if newcomer.info.identity.role is Role.DRAFTER:
        return _drafter_misfit(newcomer, others)
    info, name = newcomer.info, newcomer.info.model.name
    sizes = (info.model.vocab_size, info.model.max_context, info.kv_blocks, info.kv_block_size)
    if not (name and min(sizes)):  # clients are told them
        return "a verifier's model has a name, and its vocabulary, its context and its KV pool have a size"
    if (taken := _taken_name(info.model, others)) is not None:
        return f"another verifier serves a model or an alias {taken!r}: leave that name out of this one's"
    for other in (one for one in others if one.info.model.name == name):
        for what, theirs, ours in (
            ("tokenizer", other.info.identity.tokenizer_hash, newcomer.info.identity.tokenizer_hash),
            ("checkpoint", other.info.model.fingerprint, newcomer.info.model.fingerprint),
        ):
            if theirs != ours:
                return (
                    f"another verifier serves {name!r} with a different {what} (its hash is {theirs}, this "
                    f"worker's {ours}): load the same checkpoint on both, or give this model another name"
                )
    return None


def _taken_name(model: ModelInfo, verifiers: Iterable[Registration]) -> str | None:
    """Returns a name of another model, or an alias, that this one would have, too; None = there is none."""
    names = {model.name, *model.aliases}
    for other in (one.info.model for one in verifiers if one.info.model.name != model.name):
        for taken in sorted(names & {other.name, *other.aliases}):
            return taken
    return None


def _drafter_misfit(drafter: Registration, verifiers: list[Registration]) -> str | None:
    ours = drafter.info.identity.tokenizer_hash
    if not verifiers or any(tokenizer_fits(ours, one.info.identity.tokenizer_hash) for one in verifiers):
        return None
    target = min(verifiers, key=lambda one: one.info.model.name)
    name, theirs = target.info.model.name, target.info.identity.tokenizer_hash
    return (
        f"the draft model's tokenizer differs from that of the target {name!r} (its hash is {ours}, the "
        f"target's {theirs}): give the drafter this target's checkpoint as --target, too, or --propose suffix"
    )


def tokenizer_fits(drafter_hash: str, target_hash: str) -> bool:
    """Returns True if a drafter's tokens mean the same to a target, by the hashes of their tokenizers.

    A drafter without a tokenizer guesses from the target's own tokens, and suits every target."""
    return drafter_hash in ("", target_hash)
