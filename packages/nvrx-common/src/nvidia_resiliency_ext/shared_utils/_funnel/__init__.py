# SPDX-License-Identifier: Apache-2.0
"""The log funnel: `server` behind the servers, `client` behind the client, `shared` for both."""
