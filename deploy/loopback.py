"""`make cluster` listens where it was told to and nowhere else: what has no setting for it, and the proof."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

from router.config import LOOPBACK

HOOK = f"{__name__}.keep_to_loopback"
HOOK_VARIABLE = (
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # what Ray's runtime_env sets for a worker's setup hook
)

HEAD_SECONDS = 10  # in which the head of a request must have come; HAProxy waits for an hour
MOST_OF_ADDRESS = 1024  # connections to one of the API's ports; HAProxy has 4,096 in all
_LIMITED = f"""
    stick-table type ipv6 size 64k expire 60s store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc0_conn_cur gt {MOST_OF_ADDRESS} }}"""

HOST_VARIABLE = "OUTRIDER_CLUSTER_HOST"  # of the environment of the workers: where the API is to be reached


def keep_to_loopback() -> None:
    """Run by Ray in each of its workers before anything else: overrides what Serve 2.60 has no setting for.

    Its gRPC servers (proxies, replicas, and what replicas tell one another) bind `[::]`, HAProxy's statistics
    `*`, and its proxies and replicas the host of the API, which is HAProxy's here. If another version of Ray
    does it in another way, the start says so: it looks at what listens.
    """
    from grpc.aio._server import Server
    from ray.serve._private import haproxy_templates

    add_port = Server.add_insecure_port

    def add_loopback_port(server: Server, address: str) -> int:
        port: int = add_port(server, address.replace("[::]:", f"{LOOPBACK}:"))
        return port

    Server.add_insecure_port = add_loopback_port  # type: ignore[method-assign, assignment]
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = _bound(
        haproxy_templates.HAPROXY_CONFIG_TEMPLATE, os.environ.get(HOST_VARIABLE, LOOPBACK)
    )


def _bound(template: str, host: str) -> str:
    """Returns HAProxy's configuration with the API's ports at that host, and the others on loopback. And who
    opens many connections there, or sends half a head, takes nobody's place."""
    template = re.sub(r"\bbind \*?:", f"bind {LOOPBACK}:", template)
    template = re.sub(
        r"^defaults$", rf"\g<0>\n    timeout http-request {HEAD_SECONDS}s", template, flags=re.M
    )
    api = r"\bbind {{ config\.(?:grpc_)?frontend_host }}:(.*)$"
    return re.sub(api, rf"bind {host}:\1{_LIMITED}", template, flags=re.M)


@dataclass(frozen=True, order=True)
class Listener:
    """A TCP port that a process listens on."""

    host: str
    port: int
    process: str

    @property
    def local(self) -> bool:
        """True if only this machine reaches it."""
        address = ipaddress.ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(process: psutil.Process) -> set[Listener]:
    """Returns what a process and all that it started listen on."""
    return {found for each in (process, *process.children(recursive=True)) for found in _listeners_of(each)}


def _listeners_of(process: psutil.Process) -> Iterator[Listener]:
    try:
        name = process.name()
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield Listener(connection.laddr.ip, connection.laddr.port, name)
    except psutil.Error:  # it has ended meanwhile
        return


def unasked(found: Iterable[Listener], host: str, ports: Iterable[int]) -> list[Listener]:
    """Returns the listeners that other machines reach, though they were not asked for."""
    asked = {(host, port) for port in ports}
    return sorted(one for one in found if not one.local and (one.host, one.port) not in asked)
