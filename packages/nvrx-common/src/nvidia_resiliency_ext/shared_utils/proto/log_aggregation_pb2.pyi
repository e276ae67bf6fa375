# SPDX-License-Identifier: Apache-2.0
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogChunk(_message.Message):
    __slots__ = ("node_id", "data", "file_path", "stream_id", "seq", "resumed")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_PATH_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    data: bytes
    file_path: str
    stream_id: str
    seq: int
    resumed: bool
    def __init__(self, node_id: _Optional[str] = ..., data: _Optional[bytes] = ..., file_path: _Optional[str] = ..., stream_id: _Optional[str] = ..., seq: _Optional[int] = ..., resumed: bool = ...) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("status", "bytes_received", "committed_seq")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    status: str
    bytes_received: int
    committed_seq: int
    def __init__(self, status: _Optional[str] = ..., bytes_received: _Optional[int] = ..., committed_seq: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("stream_id", "committed_seq", "refusal", "reason")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stream_id: str
    committed_seq: int
    refusal: str
    reason: str
    def __init__(self, stream_id: _Optional[str] = ..., committed_seq: _Optional[int] = ..., refusal: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("healthy", "connected_clients")
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    healthy: bool
    connected_clients: int
    def __init__(self, healthy: bool = ..., connected_clients: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("bytes_received", "chunks_received", "bytes_written", "chunks_repeated", "bytes_lost", "buffered_bytes", "buffered_bytes_peak", "files", "open_files", "failing_files", "connected_clients", "clients")
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOST_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_BYTES_PEAK_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    FAILING_FILES_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    bytes_received: int
    chunks_received: int
    bytes_written: int
    chunks_repeated: int
    bytes_lost: int
    buffered_bytes: int
    buffered_bytes_peak: int
    files: int
    open_files: int
    failing_files: int
    connected_clients: int
    clients: _containers.RepeatedCompositeFieldContainer[ClientStats]
    def __init__(self, bytes_received: _Optional[int] = ..., chunks_received: _Optional[int] = ..., bytes_written: _Optional[int] = ..., chunks_repeated: _Optional[int] = ..., bytes_lost: _Optional[int] = ..., buffered_bytes: _Optional[int] = ..., buffered_bytes_peak: _Optional[int] = ..., files: _Optional[int] = ..., open_files: _Optional[int] = ..., failing_files: _Optional[int] = ..., connected_clients: _Optional[int] = ..., clients: _Optional[_Iterable[_Union[ClientStats, _Mapping]]] = ...) -> None: ...

class ClientStats(_message.Message):
    __slots__ = ("node_id", "stream_id", "bytes_received", "last_seq", "committed_seq", "bytes_behind", "seconds_behind")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    BYTES_BEHIND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    stream_id: str
    bytes_received: int
    last_seq: int
    committed_seq: int
    bytes_behind: int
    seconds_behind: float
    def __init__(self, node_id: _Optional[str] = ..., stream_id: _Optional[str] = ..., bytes_received: _Optional[int] = ..., last_seq: _Optional[int] = ..., committed_seq: _Optional[int] = ..., bytes_behind: _Optional[int] = ..., seconds_behind: _Optional[float] = ...) -> None: ...
