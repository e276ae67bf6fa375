# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks that join the nvrx packages to a `Trainer`; names are loaded when used.

A name needs Lightning only. The package that does the work (nvrx-ft, nvrx-straggler, nvrx-ckpt) is
asked for when a callback is constructed; without it that is an `ImportError` which names the extra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._utils import SimulatedFaultParams
    from .fault_tolerance_callback import FaultToleranceCallback
    from .fault_tolerance_sections_callback import FaultToleranceSectionsCallback
    from .straggler_det_callback import StragglerDetectionCallback

__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "SimulatedFaultParams",
    "StragglerDetectionCallback",
]

_HOMES = {
    "FaultToleranceCallback": "fault_tolerance_callback",
    "FaultToleranceSectionsCallback": "fault_tolerance_sections_callback",
    "SimulatedFaultParams": "_utils",
    "StragglerDetectionCallback": "straggler_det_callback",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not, and the modules that are."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "import_module"})
