"""A grammar process that somebody ends while it compiles, as often as the text that is asked for says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from outrider.grammar import Grammars
from router.api.grammar_process import main


def compiled(asked: Any, _: Grammars) -> str:
    folder, times = Path(asked[0]), asked[1]
    done = len(list(folder.iterdir()))
    if done < times:
        (folder / str(done)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "compiled"


if __name__ == "__main__":
    main(sys.stdin, sys.stdout, compiled)
