"""The script that tries every type of model, as a module."""

import importlib.util
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "model_types", Path(__file__).resolve().parents[2] / "scripts/model_types.py"
)
types = importlib.util.module_from_spec(_SPEC)
sys.modules["model_types"] = types
_SPEC.loader.exec_module(types)
