"""How a request to the zygote is framed, known to both sides."""

import struct

HEADER = struct.Struct("!II")  # length of the request, number of descriptors with it
