"""Known vulnerabilities in what is installed: `make audit`. Says so where nobody could be asked.

Ends with 0 = all was looked up and none is known, 1 = some are, 2 = the advisories could not be reached, or
know less than they should.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SERVICES = ("pypi", "osv")
OURS = "outrider"  # installed from this folder: nobody has advisories of it
# torch for CPUs and the like are versions of an index of their own.
MOST_UNKNOWN = 0.1  # of the packages; above it, what answers is not the advisory service


def main() -> int:
    for service in SERVICES:
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--format", "json"]
        ran = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
        packages = told(ran.stdout)
        unknown = [one["name"] for one in packages if "skip_reason" in one and one["name"] != OURS]
        if not packages or len(unknown) > MOST_UNKNOWN * len(packages):
            continue
        found = vulnerable(packages)
        print("\n".join([*found, f"{len(packages) - len(unknown)} packages were looked up at {service}"]))
        if unknown:
            print(f"it does not know {', '.join(unknown)}")
        return 1 if found else 0
    print(f"neither of {', '.join(SERVICES)} could be asked from here: NOTHING WAS AUDITED", file=sys.stderr)
    return 2


def told(output: str) -> list[dict[str, Any]]:
    """pip-audit's packages; none where it has failed."""
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return []
    return packages


def vulnerable(packages: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{package['name']} {package['version']}: {', '.join(vuln['id'] for vuln in package['vulns'])}; "
        f"mended in {', '.join(sorted({fix for vuln in package['vulns'] for fix in vuln['fix_versions']}))}"
        for package in packages
        if package.get("vulns")
    ]


if __name__ == "__main__":
    sys.exit(main())
