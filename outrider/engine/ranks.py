"""The processes that one model is divided among, and what they say to one another.

One torch.distributed world of N ranks: rank 0 leads, the others follow. Rank 0 keeps the meeting point at
which the others find one another. Every wait has an end: the death of a process is noticed at once, and one
that does not answer within PATIENCE.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from outrider.errors import OutriderError, PeerLost, StartupError

PATIENCE = timedelta(seconds=10)  # with a rank that does not answer, once all serve
LOADING_PATIENCE = timedelta(minutes=30)  # while weights are fetched and read, longer by one than by another
JOINING_PATIENCE = timedelta(seconds=60)  # with the leader's meeting point, which is there first
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 2.0  # that a lost follower's own word, or its exit code, may take to get here
MESSAGE_WORDS = 1024  # int32 words that are sent at once
REFUSAL = "refusal"  # key of the sentence of the first follower that could not start


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a group: all that a process needs to take part in it."""

    rank: int  # 0 leads
    size: int
    host: str  # address of the leader, as the others reach it
    port: int


class Followers(Protocol):
    """Whatever runs the other ranks, as seen by the leader."""

    def check(self) -> None:
        """Raises PeerLost, with the reason, where one has ended."""
        ...

    def stop(self) -> None:
        """Ends them; returns when they are gone."""
        ...


class Ranks:
    """One process's membership. A process has one at a time: torch.distributed knows one world."""

    def __init__(self, group: Place, store: Store) -> None:
        """See `host` and `join`."""
        self.group = group
        self.followers: Followers | None = None  # set by the leader once they are started
        self._store = store

    @classmethod
    def host(cls, size: int, host: str = "127.0.0.1") -> Ranks:
        """Returns the leader's membership; the others may join from now on, at this address of its
        machine."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            size,
            True,
            LOADING_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(Place(0, size, host, port), store)

    @classmethod
    def join(cls, group: Place) -> Ranks:
        """Returns a follower's membership. Raises PeerLost if no leader is there."""
        try:
            return cls(group, TCPStore(group.host, group.port, group.size, False, JOINING_PATIENCE))
        except RuntimeError as error:
            raise PeerLost("the leader of the tensor-parallel group is not there any more") from error

    @property
    def leads(self) -> bool:
        return self.group.rank == 0

    def connect(self, device: torch.device) -> None:
        """Makes the connections, when all are there. Raises PeerLost, or StartupError with the sentence of a
        follower that could not start."""
        if sys.platform == "linux" and _is_loopback(self.group.host):
            # No listener that other machines reach.
            os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"] = "lo", "=lo"
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        with self.talking():
            self._meet()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("world", self._store),
                rank=self.group.rank,
                world_size=self.group.size,
                timeout=LOADING_PATIENCE,
            )

    def _meet(self) -> None:
        """Waits for the others."""
        self._store.set(f"here/{self.group.rank}", "")
        everybody = [f"here/{rank}" for rank in range(self.group.size)]
        until = time.monotonic() + LOADING_PATIENCE.total_seconds()
        while not self._store.check(everybody):
            self.check()
            if time.monotonic() > until:
                raise PeerLost(f"not all {self.group.size} processes started within {LOADING_PATIENCE}")
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raises, at the leader, what is known of a follower that has ended: StartupError with its own
        sentence, or PeerLost."""
        if self.leads and self._store.check([REFUSAL]):
            raise StartupError(self._store.get(REFUSAL).decode())
        if self.followers is not None:
            self.followers.check()

    def refuse(self, sentence: str) -> None:
        """A follower that cannot start says why, before it ends."""
        with suppress(RuntimeError):  # the leader is gone already
            self._store.set(REFUSAL, sentence)

    def agree(self, flag: bool) -> bool:
        """Returns whether it is true of every rank."""
        return all(bool(other) for other in self.gather(torch.tensor([float(flag)])))

    def least(self, number: int) -> int:
        """Returns the least of every rank's."""
        return min(int(other) for other in self.gather(torch.tensor([number])))

    def keep_from_compiler(self) -> None:
        """From now on torch's compiler does not look into what the model's parts do together, which it would
        compile anew for each number of tokens."""
        apart = torch.compiler.disable
        self.sum = apart(self.sum)  # type: ignore[method-assign,no-untyped-call]
        self.concat = apart(self.concat)  # type: ignore[method-assign,no-untyped-call]

    def answer(self) -> None:
        """Shows every rank that all are there."""
        self.gather(torch.zeros(1))

    def settle(self) -> None:
        """Everything is loaded: from now on PATIENCE is enough."""
        self.answer()  # the slowest has come this far
        _set_pg_timeout(PATIENCE)

    def close(self) -> None:
        """Leaves the group: who still waits for this rank hears of it. The leader ends the others."""
        if dist.is_initialized():
            with suppress(RuntimeError):  # of connections that are broken
                dist.destroy_process_group()
        if self.followers is not None:
            self.followers.stop()

    # -- collectives: every rank calls the same, in the same order --

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, always in the order of ranks: so a row's bits do not depend on
        the rows beside it, as they may where a library chooses the order by the size."""
        first, second, *others = self.gather(part)
        total = first + second
        for other in others:
            total += other
        return total

    def gather(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns all ranks' parts, which have the same shape, in the order of ranks."""
        parts = part.new_empty(self.group.size, *part.shape).unbind()
        with self.talking():
            dist.all_gather(list(parts), part.contiguous())
        return parts

    def concat(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Returns [..., width] from the slices of the last dimension, which are as in `slice_of`."""
        most = -(-width // self.group.size)
        if part.shape[-1] < most:
            part = torch.nn.functional.pad(part, (0, most - part.shape[-1]))
        return torch.cat(self.gather(part), dim=-1)[..., :width]

    def slice_of(self, width: int) -> slice:
        """This rank's part of so many columns: as even as can be, the last ranks' shorter."""
        most = -(-width // self.group.size)
        return slice(min(self.group.rank * most, width), min((self.group.rank + 1) * most, width))

    def send(self, words: torch.Tensor) -> None:
        """Sends the leader's message, 1-d int32, to all others: at once up to MESSAGE_WORDS."""
        count = words.numel() + 1
        message = torch.zeros(max(count, MESSAGE_WORDS), dtype=torch.int32)
        message[0] = words.numel()
        message[1:count] = words
        with self.talking():
            dist.broadcast(message[:MESSAGE_WORDS], 0)
            if count > MESSAGE_WORDS:
                dist.broadcast(message[MESSAGE_WORDS:], 0)

    def receive(self) -> torch.Tensor:
        """Returns what `send` sent."""
        first = torch.empty(MESSAGE_WORDS, dtype=torch.int32)
        with self.talking():
            dist.broadcast(first, 0)
            count = int(first[0]) + 1
            if count <= MESSAGE_WORDS:
                return first[1:count]
            rest = torch.empty(count - MESSAGE_WORDS, dtype=torch.int32)
            dist.broadcast(rest, 0)
        return torch.cat([first[1:], rest])

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Raises PeerLost for whatever torch.distributed raises in here."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"one of the {self.group.size} processes of the tensor-parallel group ended or did not answer"
            ) from error

    def explain(self, error: PeerLost) -> OutriderError:
        """Returns the best account of why the group broke: a lost follower's own, where it comes in time."""
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self.leads and time.monotonic() < until:
            try:
                self.check()
            except (PeerLost, StartupError) as account:
                return account
            time.sleep(POLL_SECONDS)
        return error


def of_the_group(error: Exception) -> bool:
    """Returns whether torch.distributed raised it, in the middle of something else. gloo has no type of its
    own."""
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
