"""What `common` sets before any library starts comes first, whichever script is started."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from common.base.paths import REPOSITORY
from tests.pace import patient

ASKED = """import json, sys
for line in json.load(sys.stdin):
    exec(line)
    if "bitsandbytes" in sys.modules:
        sys.exit(line)
"""


def imports_before_common(script: Path) -> tuple[list[str], bool]:
    """Return what a script, and those beside it that it imports, import before `common`, and whether that comes."""
    first: list[str] = []
    for line in ast.parse(script.read_text()).body:
        if not isinstance(line, ast.Import | ast.ImportFrom):
            continue
        name = line.module if isinstance(line, ast.ImportFrom) else line.names[0].name
        beside, ends = script.with_name(f"{name}.py"), name.partition(".")[0] == "common"
        if beside.is_file():
            more, ends = imports_before_common(beside)
            first += more
        elif not ends:
            first.append(ast.unparse(line))
        if ends:
            return first, True
    return first, False


def test_no_script_starts_cuda_or_a_library_that_advises_before_common_has_set_how() -> None:
    """PEFT imports bitsandbytes, which starts CUDA, and advises each rank on kernels that nobody here calls."""
    scripts = sorted(REPOSITORY.glob("[1-3].*/run_0_*/my_*.py"))
    lines = sorted({line for script in scripts for line in imports_before_common(script)[0]})
    assert "from transformers import PreTrainedModel" in lines
    done = subprocess.run(
        [sys.executable, "-c", ASKED], input=json.dumps(lines), capture_output=True, text=True, timeout=patient(300),
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
