# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks that connect the nvrx packages to a `Trainer`; names are loaded when used.

Importing a name needs only Lightning. Constructing a callback needs the nvrx package behind it
(nvrx-ft, nvrx-straggler, nvrx-ckpt), and otherwise raises an `ImportError` that names the extra.
"""

from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.lazy_names import lazy_names

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

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "_utils": ("SimulatedFaultParams",),
        "fault_tolerance_callback": ("FaultToleranceCallback",),
        "fault_tolerance_sections_callback": ("FaultToleranceSectionsCallback",),
        "straggler_det_callback": ("StragglerDetectionCallback",),
    },
)
