"""A router that says twice a second how it is: what it knows, its processor time, how long its loop was held.

    python -m benchmarks.fleet_router redis://127.0.0.1:6379

After the ready line, lines of JSON. `held_ms`: most processor time of one turn of the event loop, in which
nobody else is heard; `late_ms`: of looks 10 ms apart how late the latest was, by the clock, whoever had the
processor meanwhile. It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outrider.options.sessions import SessionOptions
from router import service
from router.config import RouterConfig
from router.router import Router

LOOK_SECONDS, LINE_SECONDS = 0.01, 0.5


class Watched(Router):
    async def start(self) -> None:
        await super().start()
        self._watching = asyncio.create_task(self._watch())
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        """Ends the process if whoever started it is gone."""
        await asyncio.to_thread(sys.stdin.read)
        os.kill(os.getpid(), signal.SIGTERM)

    async def _watch(self) -> None:
        held, loop = 0.0, asyncio.get_running_loop()
        turn = loop._run_once  # type: ignore[attr-defined]

        def timed_turn() -> None:
            nonlocal held
            began = time.thread_time()
            turn()
            held = max(held, time.thread_time() - began)

        loop._run_once = timed_turn  # type: ignore[attr-defined]
        while True:
            held = late = 0.0
            until = time.perf_counter() + LINE_SECONDS
            while time.perf_counter() < until:
                began = time.perf_counter()
                await asyncio.sleep(LOOK_SECONDS)
                late = max(late, time.perf_counter() - began - LOOK_SECONDS)
            line = {
                "verifiers": len(self.fleet.verifiers),
                "drafters": len(self.fleet.drafters),
                "cpu": time.process_time(),
                "held_ms": held * 1e3,
                "late_ms": late * 1e3,
                "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    service.Router = Watched  # type: ignore[attr-defined]
    sessions = SessionOptions(max_sessions=100_000)
    asyncio.run(service.serve(RouterConfig(port=0, grpc_port=0, store=sys.argv[1], sessions=sessions)))
