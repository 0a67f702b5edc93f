"""The process of one probe.

python benchmarks/gpu_probes correctness/pinned --device cuda --out FOLDER --result FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also under python -P
from gpu_probes.probe import PROBES, Failed, Scene, Skipped


def outcome(name: str, scene: Scene) -> dict[str, Any]:
    """Runs a probe; what it found, or why it did not."""
    import gpu_probes.catalogue  # noqa: F401 - adds all probes

    try:
        return {"status": "ok", "says": "", "figures": dict(PROBES[name].run(scene) or {})}
    except Skipped as reason:
        return {"status": "skipped", "says": str(reason), "figures": {}}
    except Failed as reason:
        return {"status": "failed", "says": str(reason), "figures": {}}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        return {"status": "failed", "says": f"{type(error).__name__}: {lines[0]}", "figures": {}}


def main() -> None:
    """Runs the probe that the command line names, and writes its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probe")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    found = outcome(options.probe, Scene(options.device, options.out))
    options.result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
