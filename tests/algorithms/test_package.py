"""The package's door."""

from tests.programs import run_python


def test_importing_what_options_need_does_not_import_torch():
    program = (
        "import sys, lightrft.algorithms, lightrft.algorithms.correction_terms; "
        "sys.exit('torch' in sys.modules)"
    )
    run_python("-c", program, code=0)
