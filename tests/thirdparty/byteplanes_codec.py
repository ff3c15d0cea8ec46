"""A lossless codec for states of any dtype, float32 too: one zstd frame a byte plane."""

import numpy as np
import zstandard

from headrace.errors import CorruptError
from headrace.store.codecs import Codec


class BytePlanes(Codec):
    """Payload of a chunk: the length of each frame as uint32, then the frames, lowest byte first."""

    name = "byte-planes"
    lossless = True

    def encode(self, bits):
        planes = bits.reshape(-1).view(np.uint8).reshape(bits.size, bits.itemsize).T
        # contexts are made here, as instances are shared by threads and a zstd context must not be
        frames = [zstandard.ZstdCompressor(level=1).compress(plane.tobytes()) for plane in planes]
        sizes = np.array([len(frame) for frame in frames], "<u4")
        return [sizes.tobytes(), *frames], None

    def decode(self, payload, scales, out):
        width = out.itemsize
        if len(payload) < 4 * width:
            raise CorruptError("it is shorter than its table of frames")
        ends = 4 * width + np.frombuffer(payload[: 4 * width], "<u4").cumsum()
        if ends[-1] != len(payload):
            raise CorruptError(f"its frames end at {ends[-1]} of {len(payload)} bytes")
        planes = out.reshape(-1).view(np.uint8).reshape(out.size, width)
        for number, (start, end) in enumerate(zip([4 * width, *ends[:-1]], ends, strict=True)):
            try:
                plane = zstandard.ZstdDecompressor().decompress(payload[start:end])
            except zstandard.ZstdError as exc:
                raise CorruptError(f"plane {number} does not decode ({exc})") from exc
            if len(plane) != out.size:
                raise CorruptError(f"plane {number} has {len(plane)} bytes where {out.size} belong")
            planes[:, number] = np.frombuffer(plane, np.uint8)

    def tensor(self, rows, hidden, payload_bytes):
        return "U8", [payload_bytes]
