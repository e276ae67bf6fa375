# SPDX-License-Identifier: Apache-2.0
"""Helpers for nested dicts and lists, kept under their public names; the code is in `_dicts`."""

from nvidia_resiliency_ext.fault_tolerance._dicts.nested import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)
from nvidia_resiliency_ext.fault_tolerance._dicts.state import (
    compare_namespaces,
    compare_state_dicts_and_get_new_values,
    merge_namespace_changes,
    merge_namespaces_,
    merge_state_dicts_,
)

__all__ = [
    "compare_namespaces",
    "compare_state_dicts_and_get_new_values",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "inspect_types",
    "map_reduce",
    "merge",
    "merge_namespace_changes",
    "merge_namespaces_",
    "merge_state_dicts_",
    "nested_items_iter",
    "nested_values",
]
