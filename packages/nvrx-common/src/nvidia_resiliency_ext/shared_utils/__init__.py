# SPDX-License-Identifier: Apache-2.0
"""What the nvrx packages share: processes, sockets, files, time, logs, events and health checks.

Import the module you need, for example `nvidia_resiliency_ext.shared_utils.children`; this
package imports nothing by itself.
"""
