"""The package's door."""

import subprocess
import sys

from tests.machine import seconds


def test_importing_what_options_need_does_not_import_torch():
    program = (
        "import sys, lightrft.algorithms, lightrft.algorithms.correction_terms; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=seconds(60))
