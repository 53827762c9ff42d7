"""Which workers fit together: the decision alone."""

from dataclasses import replace

from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from router.compatibility import Registration, incompatibility


def worker(
    role: Role, worker_id: str, *, model: str = "m", fingerprint: str = "f", tokenizer: str = "t"
) -> Registration:
    described = ModelInfo(model, fingerprint, "Arch", 1, 10, 10, (), "cpu", "float32", True)
    identity = Identity(role, worker_id, 1, fingerprint, tokenizer)
    return Registration(
        WorkerInfo(identity, described, 1, 16), "h:1", TokenizerFiles(tokenizer, tokenizer, "")
    )


V = worker(Role.VERIFIER, "v")


def test_workers_of_the_same_model_and_tokenizer_fit() -> None:
    assert incompatibility(worker(Role.VERIFIER, "w"), [V]) is None
    assert incompatibility(worker(Role.DRAFTER, "d", model="other", fingerprint="g"), [V]) is None


def named(worker_id: str, model: str, *aliases: str) -> Registration:
    found = worker(Role.VERIFIER, worker_id, model=model, fingerprint=model)
    described = replace(found.info.model, aliases=aliases)
    return replace(found, info=replace(found.info, model=described))


def test_no_model_takes_the_name_of_another() -> None:
    """Or its verifier would get what clients ask of that one."""
    there = named("v", "m", "small")
    refused = incompatibility(named("w", "a", "m"), [there])
    assert refused == "another verifier serves a model or an alias 'm': leave that name out of this one's"
    assert "'small'" in (incompatibility(named("w", "small"), [there]) or "")
    assert "'small'" in (incompatibility(named("w", "a", "b", "small"), [there]) or "")
    assert incompatibility(named("w", "a", "b"), [there]) is None
    assert incompatibility(named("w", "m", "small", "new"), [there]) is None


def test_a_drafter_fits_while_no_target_is_served() -> None:
    assert incompatibility(worker(Role.DRAFTER, "d"), []) is None


def test_a_drafter_fits_where_any_target_has_its_tokenizer() -> None:
    other = worker(Role.VERIFIER, "w", model="n", tokenizer="u")
    assert incompatibility(worker(Role.DRAFTER, "d", tokenizer="u"), [V, other]) is None


def test_a_drafter_without_a_tokenizer_fits_every_target() -> None:
    assert incompatibility(worker(Role.DRAFTER, "d", tokenizer=""), [V]) is None


def test_a_drafter_of_another_tokenizer_is_told_so() -> None:
    drafter = worker(Role.DRAFTER, "v", tokenizer="u")  # whatever it calls itself
    expected = "tokenizer differs from that of the target 'm' (its hash is u, the target's t)"
    assert expected in (incompatibility(drafter, [V]) or "")


def test_another_model_under_the_same_name_is_refused() -> None:
    weights = incompatibility(worker(Role.VERIFIER, "w", fingerprint="g"), [V]) or ""
    assert (
        "another verifier serves 'm' with a different checkpoint (its hash is f, this worker's g)" in weights
    )
    tokenizer = incompatibility(worker(Role.VERIFIER, "w", tokenizer="u"), [V]) or ""
    assert "a different tokenizer (its hash is t, this worker's u)" in tokenizer


def test_another_model_under_another_name_fits() -> None:
    assert incompatibility(worker(Role.VERIFIER, "w", model="n", fingerprint="g", tokenizer="u"), [V]) is None


def test_a_worker_is_not_compared_with_its_own_former_registration() -> None:
    assert incompatibility(worker(Role.VERIFIER, "v", fingerprint="g"), [V]) is None


def test_a_model_without_a_name_or_a_size_is_not_served() -> None:
    """It would be listed: /v1/models tells contexts of at least one token."""
    info = V.info
    for changed in (
        replace(info, kv_blocks=0),
        replace(info, kv_block_size=0),
        *(
            replace(info, model=replace(info.model, **without))
            for without in ({"vocab_size": 0}, {"max_context": 0}, {"name": ""})
        ),
    ):
        assert "have a size" in (incompatibility(replace(V, info=changed), []) or "")
