# SPDX-License-Identifier: Apache-2.0
"""Writes a slot word by word, as a rank does, at times that the test chooses."""

from nvidia_resiliency_ext.fault_tolerance._monitor import slot


class SlotWriter:
    """A slot in ordinary memory."""

    def __init__(self, layout, now_ns, first_iteration=slot.NO_ITERATION):
        """Begin session 1."""
        self.layout = layout
        self.words = memoryview(bytearray(layout.size_bytes)).cast("q")
        slot.begin_slot(self.words, 1, now_ns, first_iteration)

    def heartbeat(self, now_ns):
        """Record a heartbeat."""
        self.words[slot.W_HEARTBEAT_LAST] = now_ns
        self.words[slot.W_HEARTBEAT_COUNT] += 1
        if not self.words[slot.W_HEARTBEAT_FIRST]:
            self.words[slot.W_HEARTBEAT_FIRST] = now_ns

    def open(self, section, now_ns):
        """Record that a section was opened."""
        self.words[self.layout.index[section]] = now_ns
        if section == slot.STEP and not self.words[slot.W_STEP_FIRST_OPEN]:
            self.words[slot.W_STEP_FIRST_OPEN] = now_ns

    def close(self, section, now_ns, *, is_last):
        """Record that a section was closed; `is_last` when no other one is open."""
        if is_last:
            self.words[slot.W_OUT_OF_SECTION_START] = now_ns
        self.words[self.layout.index[section]] = 0

    def iterate(self, iteration):
        """Record the training iteration."""
        self.words[slot.W_ITERATION] = iteration

    def view(self):
        """Take a look at the slot."""
        return slot.read_slot(self.words, self.layout)
