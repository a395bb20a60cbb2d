"""The script that tries every type of model, as a module."""

from tests.conftest import REPOSITORY
from tests.programs import load_script

types = load_script(REPOSITORY / "scripts/model_types.py")
