"""Several hosts on one machine: network namespaces with addresses of their own, joined by a switch.

The switch is a namespace too, so nothing of it shows outside, and runs side by side do not meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.cluster import namespace
from tests.cluster.namespace import ip
from tests.cluster.process import Process

SUBNET = "10.77.0"


@dataclass(frozen=True)
class Host:
    """One of them. Commands run in it, sockets are opened from it, and its cable can be pulled."""

    name: str
    address: str
    namespace: str
    switch: str  # the switch's namespace, where the other end of its cable is

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> Process:
        """Starts a command here."""
        return Process(("ip", "netns", "exec", self.namespace, *command), environment or {})

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """What this thread opens meanwhile, it opens from here."""
        return namespace.entered(self.namespace)

    def empty(self) -> None:
        """Kills whatever runs here."""
        namespace.empty(self.namespace)

    def cut(self) -> None:
        """Pulls the cable: packets are lost in both directions and nobody is told."""
        ip("-n", self.switch, "link", "set", "dev", self.name, "down")

    def join(self) -> None:
        """Puts the cable back."""
        ip("-n", self.switch, "link", "set", "dev", self.name, "up")


@contextlib.contextmanager
def switched(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts by name, all on one switch, removed at the end with whatever still runs in them."""
    namespace.remove_leftovers()
    with contextlib.ExitStack() as stack:

        def add(name: str) -> str:
            full = namespace.add(name)
            stack.callback(namespace.remove, full)
            return full

        switch = add("switch")
        ip("-n", switch, "link", "add", "dev", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "dev", "bridge", "up")
        hosts = {}
        for number, name in enumerate(names, start=10):
            full = add(name)
            ip(
                "-n",
                full,
                "link",
                "add",
                "dev",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                name,
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", "dev", name, "master", "bridge", "up")
            ip("-n", full, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            ip("-n", full, "link", "set", "dev", "eth0", "up")
            hosts[name] = Host(name, f"{SUBNET}.{number}", full, switch)
        yield hosts
