# SPDX-License-Identifier: Apache-2.0
"""The package that nvrx-attribution and nvrx-straggler share; it owns no analysis of its own.

Two distributions have modules below this one, and each must work without the other. So nvrx-common
holds this file: it searches every installed distribution for submodules, and takes unknown public
names from ``_api``, a module of nvrx-attribution, on first use.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._api import *  # noqa: F403 - the names are its __all__


def __getattr__(name: str) -> object:
    """Return the public name from nvrx-attribution.

    ``from nvidia_resiliency_ext.attribution import straggler`` asks for the attribute before it
    looks for a submodule, and only an AttributeError lets it go on; an ImportError would end it.
    """
    if not name.startswith("_"):
        from importlib import import_module

        api_name = f"{__name__}._api"
        try:
            api = import_module(api_name)
        except ModuleNotFoundError as error:
            if error.name != api_name:  # nvrx-attribution is there and lacks something itself
                raise
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r} here: public names of"
                " this module come with the distribution nvrx-attribution"
                " (pip install nvrx-attribution)",
                name=name,
            ) from None
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
