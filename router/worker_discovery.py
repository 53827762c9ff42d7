"""Takes the store's workers into the fleet, and out if they leave: one task for each worker's record."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

import grpc
import grpc.aio

from outrider.errors import IdInUse, OutriderError, PeerRefused, Unavailable
from outrider.net.allowance import CUT_OFF_SECONDS, CutOff
from outrider.net.backoff import Backoff
from outrider.net.diagnosis import why_unreachable
from outrider.net.heartbeat import IDLE_TICKS, TICK_SECONDS
from outrider.net.rpc import ask, channel
from outrider.net.tasks import propagate_cancel
from outrider.net.tls import Tls
from outrider.store.store import Store
from outrider.wire.description import TokenizerFiles, WorkerRecord
from outrider.wire.hello import Identity, Role, WorkerKey
from outrider.wire.methods import DRAFTER_SESSIONS, GET_TOKENIZER, MAX_TOKENIZER_BYTES, VERIFIER_SESSIONS
from outrider.worker.garbage import spare_newcomers
from router.compatibility import Registration, incompatibility, tokenizer_fits
from router.fleet import Fleet
from router.workers import ANSWER_SECONDS, Drafter, Verifier, worker_error

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
GOOD_SECONDS = 10.0  # for which a worker must be held, for the pauses to begin anew
UNJUDGED_SECONDS = 10.0  # for which a drafter hears nothing while there is no target to compare it with
NO_TARGET = "no target worker that it may draft for has come yet"
REPEAT_SECONDS = 20.0  # between two tellings of the same word: a store may have lost the first
RETRY_SECONDS = 1.0  # after a telling that the store did not take
ROUND_SECONDS = 1.0  # words are repeated in rounds, so that a store takes many of them in one call
MOST_JOINING = 16  # workers of a role that the router connects to at once: sessions run meanwhile
SPARED_AT_ONCE = 64  # workers by which the fleet must have grown
BEGUN_AT_ONCE = 64  # workers that are begun with before others have their turn: all may come at once
TURN_SECONDS = 0.5  # after which one that has not answered keeps no other waiting
FETCH_SECONDS = 0.1  # the same of one that is asked for the tokenizer of its kind
MOST_FETCHES = 16  # of tokenizers at once, whatever their kind
MOST_TOKENIZERS = 8 * MAX_TOKENIZER_BYTES  # characters of all that are kept


Tokenized = tuple[str, str]
"""(fingerprint of a model, hash of its tokenizer): verifiers that have both in common send the same files."""


class WorkerDiscovery:
    """Follows the store. What a task puts into the fleet, it takes out."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        router: Identity,
        jitter: Callable[[], float] = random.random,
        tls: Tls | None = None,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._router = router
        self._jitter = jitter
        self._tls = tls
        self._listed: Mapping[WorkerKey, WorkerRecord] = {}  # in the order in which they came
        self._records: dict[WorkerKey, WorkerRecord] = {}  # each has its task
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}
        self._turns = {role: asyncio.Semaphore(MOST_JOINING) for role in (Role.VERIFIER, Role.DRAFTER)}
        self._tokenizers: dict[Tokenized, TokenizerFiles] = {}  # of the verifiers in the store, one of a kind
        self._fetching: dict[Tokenized, asyncio.Semaphore] = {}  # for each kind of verifier in the store
        self._fetches = asyncio.Semaphore(MOST_FETCHES)
        self._kinds: dict[str, set[Tokenized]] = {}  # of the verifiers in the store, by their model's name
        self._busy: dict[Verifier | Drafter, None] = {}  # that have sessions, and some that had
        self._spared = 0  # workers of the fleet when they were spared last
        self._unjudged: dict[Drafter, None] = {}  # of the fleet: nobody to compare them with has come yet

    async def run(self) -> NoReturn:
        """Runs until it is cancelled."""
        watching = asyncio.create_task(self._watch())
        try:
            async for records in self._store.workers():
                await self._follow(records)
            raise AssertionError("a store's workers have no end")
        finally:
            tasks = [watching, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> NoReturn:
        """Lets time pass for all workers of the fleet, so that those that fell silent are given up."""
        before = 0
        while True:
            if (size := self._size()) == before:  # all that came have told how they are
                self._spare(1)
            before = size
            for tick in range(IDLE_TICKS):
                await asyncio.sleep(TICK_SECONDS)
                for worker in list(self._busy):
                    if worker.has_sessions:
                        worker.tick()
                    else:
                        del self._busy[worker]
                workers: list[Verifier | Drafter] = [*self._fleet.verifiers.values()]
                for worker in [*workers, *self._fleet.drafters.values()] if tick == 0 else ():
                    if not worker.has_sessions:
                        worker.tick(IDLE_TICKS)

    def _size(self) -> int:
        return len(self._fleet.verifiers) + len(self._fleet.drafters)

    def _spare(self, grown_by: int) -> None:
        """If the fleet has grown by so many, lets the garbage collector pass over what belongs to its
        workers: nothing else runs while it goes through all. Done for the largest fleet that there was, not
        for each worker that takes another's place: so little is kept."""
        if (size := self._size()) >= self._spared + grown_by:
            self._spared = size
            spare_newcomers()

    async def _follow(self, records: Mapping[WorkerKey, WorkerRecord]) -> None:
        for key, known in list(self._records.items()):
            now = records.get(key)
            if now is None or (now.info, now.address) != (known.info, known.address):
                del self._records[key]
                self._tasks[key].cancel()
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        self._listed, self._kinds = records, {}
        for one in (one for (role, _), one in records.items() if role is Role.VERIFIER):
            self._kinds.setdefault(one.info.model.name, set()).add(_tokenized(one))
        there = {kind for kinds in self._kinds.values() for kind in kinds}
        self._tokenizers = {key: files for key, files in self._tokenizers.items() if key in there}
        self._fetching = {key: self._fetching.get(key) or asyncio.Semaphore(1) for key in there}
        unknown = [key for key in records if key not in self._records]
        for count, key in enumerate(unknown, 1):
            self._records[key], former = records[key], self._tasks.get(key)
            self._tasks[key] = asyncio.create_task(self._keep_hold(records[key], former))
            if count % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _keep_hold(self, record: WorkerRecord, former: asyncio.Task[None] | None) -> None:
        """Holds the worker, again and again, until it is cancelled; first waits for its predecessor's end."""
        if former is not None:
            await asyncio.wait((former,))
        identity = record.info.identity
        who = f"{identity.role.name.lower()} {identity.worker_id}"
        backoff = Backoff(FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, GOOD_SECONDS)
        complained = said = ""
        loop = asyncio.get_running_loop()
        while True:
            began, held, least = loop.time(), 0.0, 0.0
            try:
                why = await propagate_cancel(self._hold(record))
            except PeerRefused as refused:
                log.warning("%s is refused: %s", who, refused.message)
                await self._tell(identity, refusal=refused.message)
            except CutOff as cut_off:
                log.warning("%s: %s", who, cut_off.message)
                self._fleet.metrics.worker_cut_off(identity.role.name.lower())
                least = CUT_OFF_SECONDS
                with suppress(OutriderError):
                    await self._store.answer(identity, self._router.worker_id, None, cut_off.message)
            except OutriderError as error:
                if error.message != complained:
                    complained, said = error.message, await self._why(record, error)
                    log.warning("%s is not taken in: %s; trying again", who, said)
                with suppress(OutriderError):
                    await self._store.answer(identity, self._router.worker_id, None, said)
            except Exception:
                log.exception("the router failed on %s; trying again", who)
            else:
                log.warning("%s is given up: %s; trying again", who, why)
                held, complained = loop.time() - began, ""
            await asyncio.sleep(max(backoff.after(held), least) * (0.5 + self._jitter() / 2))

    async def _why(self, record: WorkerRecord, error: OutriderError) -> str:
        """Returns what is wrong, in a sentence for who runs the worker. Only one with a certificate is told
        what the router finds at the address that it has named."""
        certified = self._tls is not None and self._tls.mutual
        found = await why_unreachable(record.address, self._tls) if certified else ""
        return f"the router does not reach the worker: {found}" if found else error.message

    async def _hold(self, record: WorkerRecord) -> str:
        """Connects, takes the worker in, and returns why it is given up when its stream ends, or is silent.

        Raises PeerRefused if it does not fit, Unavailable if it cannot be reached."""
        verifies = record.info.identity.role is Role.VERIFIER
        if verifies:  # a drafter is not trusted with the memory and the time that a tokenizer takes
            await self._fetch(record)
        events = (VERIFIER_SESSIONS if verifies else DRAFTER_SESSIONS).answered
        async with AsyncExitStack() as stack:
            # In its turn: a connection takes its time to make. And only the worker has the tokenizer then.
            def called() -> Verifier | Drafter:
                connection = channel(record.address, self._tls, events.max_bytes, watched=True)
                stack.push_async_exit(connection)
                tokenizer = self._tokenizers.get(_tokenized(record)) if verifies else None
                registration = Registration(record.info, record.address, tokenizer, record.join_address)
                return (Verifier if verifies else Drafter)(registration, connection, record.load)

            return await self._keep(record.info.identity.role, called)

    async def hold_joined(self, drafter: Drafter) -> str:
        """Takes in a drafter that opened its stream by itself, and returns why it is given up. Raises
        PeerRefused if it does not fit, IdInUse if a worker of its name is there already."""
        return await self._keep(Role.DRAFTER, lambda: drafter)

    async def _keep(self, role: Role, begin: Callable[[], Verifier | Drafter]) -> str:
        worker: Verifier | Drafter | None = None
        try:
            async with _turn(self._turns[role], TURN_SECONDS):
                worker = begin()
                worker.on_busy = partial(self._busy.setdefault, worker)
                await worker.connect(self._router)
                self._admit(worker)
                self._spare(SPARED_AT_ONCE)
            return await self._until_gone(worker)
        finally:
            if worker is not None:
                self._let_go(worker)

    def _let_go(self, worker: Verifier | Drafter) -> None:
        worker.hang_up()
        worker.on_busy = bool  # else the two of them wait for the garbage collector
        self._busy.pop(worker, None)
        self._unjudged.pop(worker, None)  # type: ignore[arg-type]  # verifiers never are
        if self._fleet.remove(worker):
            log.info("%s %s is out", worker.identity.role.name.lower(), worker.identity.worker_id)
        worker.registration = replace(worker.registration, tokenizer=None)  # megabytes, and the worker stays

    async def _fetch(self, record: WorkerRecord) -> None:
        """Fetches a verifier's tokenizer, from the first of its kind."""
        key = _tokenized(record)
        async with _turn(self._fetching.setdefault(key, asyncio.Semaphore(1)), FETCH_SECONDS):
            if key not in self._tokenizers:
                async with self._fetches:
                    self._keep_tokenizer(key, await self._fetched(record))

    async def _fetched(self, record: WorkerRecord) -> TokenizerFiles:
        async with channel(record.address, self._tls, MAX_TOKENIZER_BYTES) as connection:
            files = await fetch_tokenizer(connection, record.info.identity)
        if files.hash != record.info.identity.tokenizer_hash:  # and others of its kind would get that
            raise Unavailable("another process, with another tokenizer, answered at the worker's address")
        return files

    def _keep_tokenizer(self, key: Tokenized, files: TokenizerFiles) -> None:
        """Raises Unavailable if there is no room for it beside those of other kinds."""
        kept = sum(len(one.json) for one in self._tokenizers.values())
        if key not in self._tokenizers and kept + len(files.json) > MOST_TOKENIZERS:
            raise Unavailable(
                "the router keeps the tokenizers of as many kinds of verifiers as it has room for"
            )
        self._tokenizers.setdefault(key, files)

    def _admit(self, worker: Verifier | Drafter) -> None:
        """Checks and adds in one go: nothing can join in between."""
        if isinstance(worker, Drafter):
            self._make_way(worker)
            self._judge(worker)
            if not worker.verdict.done():
                self._unjudged[worker] = None
            elif (sentence := worker.verdict.result()) is not None:
                raise PeerRefused(sentence)
            self._fleet.add_drafter(worker)
            return
        sentence = incompatibility(worker.registration, self._fleet.served())
        if sentence is not None:
            raise PeerRefused(sentence)
        self._give_way(worker)
        worker.verdict.set_result(None)
        self._fleet.add_verifier(worker)
        for drafter in list(self._unjudged):
            self._judge(drafter)

    def _give_way(self, verifier: Verifier) -> None:
        """Of two checkpoints of one name all routers take the one that was in the store first, whichever they
        reach first: else each could be refused somewhere, and both would end. Raises Unavailable."""
        name = verifier.registration.info.model.name
        if len(self._kinds.get(name, ())) < 2:
            return
        for key, record in self._listed.items():
            if key == verifier.identity.key:
                return
            own = Registration(record.info, record.address, None)
            if key[0] is Role.VERIFIER and incompatibility(verifier.registration, [own]) is not None:
                raise Unavailable(
                    f"verifier {key[1]} came first, which serves {name!r} with another checkpoint or "
                    "tokenizer: this one waits until that is taken in, or is gone"
                )

    def _make_way(self, drafter: Drafter) -> None:
        """One id is one drafter's: who is in the store comes before who joined. Raises IdInUse."""
        former = self._fleet.drafters.get(drafter.identity.worker_id)
        if drafter.joined and (former is not None or drafter.identity.key in self._records):
            raise IdInUse(f"a drafter with the id {drafter.identity.worker_id} is here already")
        if former is not None:
            former.give_up("another drafter has its id")
            self._let_go(former)

    def _judge(self, drafter: Drafter) -> None:
        """Sets the worker's verdict once it can be known: there is a target to compare it with, and none that
        it fits is in the store but not in the fleet yet."""
        served = self._fleet.served()
        if drafter.verdict.done() or not served:
            return
        sentence = incompatibility(drafter.registration, served)
        if sentence is None or not self._awaited(drafter.identity.tokenizer_hash):
            drafter.verdict.set_result(sentence)
            self._unjudged.pop(drafter, None)

    def _awaited(self, tokenizer_hash: str) -> bool:
        """Returns True if the store has a verifier with that tokenizer."""
        return any(tokenizer_fits(tokenizer_hash, one) for _, one in self._fetching)

    async def _until_gone(self, worker: Verifier | Drafter) -> str:
        """Returns why the worker is gone, once it is. Raises PeerRefused if it turns out not to fit."""
        telling = asyncio.create_task(self._tell_verdict(worker))
        events = asyncio.create_task(worker.listen())
        try:
            await asyncio.wait((telling, events), return_when=asyncio.FIRST_COMPLETED)
            return events.result() if events.done() else telling.result()
        finally:
            for task in (telling, events):
                task.cancel()
            await asyncio.gather(telling, events, return_exceptions=True)

    async def _tell_verdict(self, worker: Verifier | Drafter) -> NoReturn:
        """Tells a worker its verdict. A drafter's is known once there is a target to compare it with: if that
        takes its time, it hears so."""
        await asyncio.wait((worker.verdict,), timeout=UNJUDGED_SECONDS)
        if not worker.verdict.done() and worker.registration.address:
            waiting = asyncio.create_task(self._tell(worker.identity, trouble=NO_TARGET))
            try:
                await asyncio.wait((worker.verdict,))
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
        sentence = await worker.verdict
        if sentence is not None:
            raise PeerRefused(sentence)
        if isinstance(worker, Drafter) and (verifier := self._fleet.verifier_of(worker)) is not None:
            worker.reach(verifier, partial(self._fleet.doubts.unreached, worker, verifier))
        if worker.registration.address:
            await self._tell(worker.identity)
        await asyncio.Event().wait()  # who joined knows by its stream
        raise AssertionError("nobody sets it")

    async def _tell(
        self, worker: Identity, refusal: str | None = None, trouble: str | None = None
    ) -> NoReturn:
        """Tells the worker its verdict again and again: the store may be away, or lose it."""
        while True:
            pause = RETRY_SECONDS
            with suppress(OutriderError):
                await self._store.answer(worker, self._router.worker_id, refusal, trouble)
                pause = REPEAT_SECONDS
            now = asyncio.get_running_loop().time()
            then = now + pause * (0.5 + self._jitter() / 2)
            await asyncio.sleep(then - now + ROUND_SECONDS - then % ROUND_SECONDS)


@asynccontextmanager
async def _turn(turns: asyncio.Semaphore, seconds: float) -> AsyncIterator[None]:
    """Waits for a turn, which others have after so many seconds, too. Many workers may come at once: if all
    were asked at once, none would answer in time."""
    over = False

    def end() -> None:
        nonlocal over
        if not over:
            over = True
            turns.release()

    await turns.acquire()
    ending = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    finally:
        ending.cancel()
        end()


def _tokenized(record: WorkerRecord) -> Tokenized:
    return record.info.identity.model_fingerprint, record.info.identity.tokenizer_hash


async def fetch_tokenizer(connection: grpc.aio.Channel, worker: Identity) -> TokenizerFiles:
    """Returns the tokenizer of a worker that registers. Raises Unavailable if it does not answer."""
    try:
        return await ask(connection, GET_TOKENIZER[worker.role], None, ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise PeerRefused(f"the worker's tokenizer is too large ({error.details()})") from None
        raise worker_error(error) from None
