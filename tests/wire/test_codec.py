"""What goes over the wire comes back as it was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2
from outrider.wire import codec
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo, WorkerRecord
from outrider.wire.hello import Identity, Role, hello_to_wire
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.registry import RECORD
from outrider.wire.session import SessionParams, new_session_id

finite = st.floats(allow_nan=False, allow_infinity=False)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)

sampling_params = st.builds(
    SamplingParams,
    temperature=finite,
    top_k=uint32,
    top_p=finite,
    min_p=finite,
    presence_penalty=finite,
    frequency_penalty=finite,
    repetition_penalty=finite,
    logit_bias=st.dictionaries(uint32, st.floats(width=32, allow_nan=False), max_size=5),
    seed=uint64,
)
printable = text.filter(str.isprintable)
addresses = st.integers(1, 2**16 - 1).map("h-1.example:{}".format)
models = st.builds(
    ModelInfo,
    name=printable,
    fingerprint=printable,
    architecture=printable,
    parameters=uint64,
    vocab_size=uint32,
    max_context=uint32,
    eos_token_ids=st.lists(uint32, max_size=4).map(tuple),
    device=printable,
    dtype=printable,
    bit_exact=st.booleans(),
    tensor_parallel_size=uint32,
    quantization=printable,
    numerics=printable,
)
workers = st.builds(
    WorkerInfo,
    identity=st.builds(
        Identity,
        role=st.sampled_from([Role.VERIFIER, Role.DRAFTER]),
        worker_id=printable,
        incarnation=uint64,
        model_fingerprint=printable,
        tokenizer_hash=printable,
    ),
    model=models,
    kv_blocks=uint32,
    kv_block_size=uint32,
)
number = st.floats(-codec.MOST_MEASURED, codec.MOST_MEASURED)
verifier_loads = st.builds(VerifierLoad, running=uint32, waiting=uint32, price=number, draining=st.booleans())
drafter_loads = st.builds(
    DrafterLoad, sessions=uint32, busy=number, round_trips=st.dictionaries(text, number, max_size=4)
)


def with_load(info: WorkerInfo) -> st.SearchStrategy[WorkerRecord]:
    loads = verifier_loads if info.identity.role is Role.VERIFIER else drafter_loads
    return st.builds(WorkerRecord, info=st.just(info), address=addresses, load=st.none() | loads)


records = workers.flatmap(with_load)
tokenizers = st.builds(
    TokenizerFiles,
    hash=text,
    json=text,
    chat_template=text,
    special_tokens=st.dictionaries(text, text, max_size=4),
)


@given(sampling_params)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    raw = codec.sampling_to_wire(params).SerializeToString()
    assert codec.sampling_from_wire(common_pb2.SamplingParams.FromString(raw)) == params


def test_a_session_s_parameters_come_back_as_they_were() -> None:
    params = SessionParams(
        (1, 0, 2**31),
        SamplingParams(temperature=0.5, seed=2**64 - 1),
        7,
        (3, 2),
        b"\0s",
        0,
        "",
        True,
        5,
        7,
        3,
        b"t",
    )
    raw = codec.params_to_wire(params).SerializeToString()
    assert codec.params_from_wire(common_pb2.SessionParams.FromString(raw)) == params


def test_a_salt_and_a_tenant_are_bounded() -> None:
    codec.params_from_wire(common_pb2.SessionParams(cache_salt=b"s" * 32))
    with pytest.raises(InvalidRequest, match="cache_salt must be at most 32 bytes, not 33"):
        codec.params_from_wire(common_pb2.SessionParams(cache_salt=b"s" * 33))
    codec.params_from_wire(common_pb2.SessionParams(tenant=b"t" * 32))
    with pytest.raises(InvalidRequest, match="tenant must be at most 32 bytes"):
        codec.params_from_wire(common_pb2.SessionParams(tenant=b"t" * 33))


@given(workers)
def test_a_workers_description_survives_the_wire(info: WorkerInfo) -> None:
    raw = codec.worker_info_to_wire(info).SerializeToString()
    assert codec.worker_info_from_wire(common_pb2.WorkerInfo.FromString(raw)) == info


@given(records)
def test_a_workers_record_survives_the_wire_and_is_always_written_alike(record: WorkerRecord) -> None:
    raw = RECORD.to_bytes(record)
    assert RECORD.from_bytes(raw) == record
    assert RECORD.to_bytes(RECORD.from_bytes(raw)) == raw


@pytest.mark.parametrize("measured", [math.inf, -math.inf, math.nan, 1e300])
def test_a_load_of_which_no_measurement_can_come_is_refused(measured: float) -> None:
    """A histogram's sum would be spoilt for good."""
    verifier = codec.verifier_load_to_wire(VerifierLoad(step_seconds=measured))
    busy = codec.drafter_load_to_wire(DrafterLoad(busy=measured))
    far = codec.drafter_load_to_wire(DrafterLoad(round_trips={"v:1": measured}))
    with pytest.raises(InvalidRequest, match="no such number can be measured"):
        codec.verifier_load_from_wire(verifier)
    for drafter in (busy, far):
        with pytest.raises(InvalidRequest, match="no such number can be measured"):
            codec.drafter_load_from_wire(drafter)


@pytest.mark.parametrize("raw", [b"\xff\xff", b""])
def test_bytes_that_are_no_record_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        RECORD.from_bytes(raw)


@given(tokenizers)
def test_a_tokenizer_survives_the_wire(files: TokenizerFiles) -> None:
    raw = codec.tokenizer_to_wire(files).SerializeToString()
    assert codec.tokenizer_from_wire(common_pb2.Tokenizer.FromString(raw)) == files


def test_logit_biases_are_rounded_to_32_bits() -> None:
    message = codec.sampling_to_wire(SamplingParams(logit_bias={3: 0.1}))
    (bias,) = codec.sampling_from_wire(message).logit_bias.values()
    assert bias != 0.1
    assert math.isclose(bias, 0.1, rel_tol=1e-7)


def test_session_ids_are_fresh_and_of_one_length() -> None:
    ids = {new_session_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(codec.session_id_from_wire(one)) for one in ids} == {16}


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_session_id_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"session_id must be 16 bytes, not {length}"):
        codec.session_id_from_wire(bytes(length))


def test_a_router_is_no_worker() -> None:
    message = common_pb2.WorkerInfo(hello=hello_to_wire(Identity(Role.ROUTER, "router", 1).hello()))
    with pytest.raises(InvalidRequest, match="role must be ROLE_VERIFIER or ROLE_DRAFTER"):
        codec.worker_info_from_wire(message)
