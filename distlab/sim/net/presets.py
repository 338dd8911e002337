"""Networks by name, in round figures: they compare kinds of links, not products.

Speeds are those of the vendor or the standard, per direction. Latencies come from no
data sheet: they are about what software sees end to end. We measured none of these
numbers; `distlab calibrate` measures your own machine.
"""

from __future__ import annotations

from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import AlphaBeta, Network

PRESETS: dict[str, Network] = {
    # Processes of one machine over loopback sockets: a copy into the kernel and out.
    "laptop": AlphaBeta(alpha_s=30e-6, bytes_per_s=1e9),
    # IEEE 802.3ae and 802.3ba: 10 and 100 Gbit/s. Latency: TCP, and RDMA or tuned TCP.
    "ethernet-10g": AlphaBeta(alpha_s=30e-6, bytes_per_s=1.25e9),
    "ethernet-100g": AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9),
    # NVIDIA ConnectX-7 and Quantum-2 data sheets: NDR is 400 Gbit/s a port.
    "infiniband-ndr": AlphaBeta(alpha_s=5e-6, bytes_per_s=50e9),
    # NVIDIA H100 data sheet: NVLink 900 GB/s a GPU, both directions taken together.
    "nvlink": AlphaBeta(alpha_s=3e-6, bytes_per_s=450e9),
    # NVIDIA DGX H100 data sheet: 8 GPUs on NVLink switches, 8 ConnectX-7 of 400 Gbit/s
    # for the cluster's network. The fabric is taken to be without oversubscription.
    "dgx-h100": Fabric(
        node_size=8,
        intra_node_alpha_s=3e-6,
        intra_node_bytes_per_s=450e9,
        nics=8,
        nic_bytes_per_s=50e9,
        nic_alpha_s=5e-6,
    ),
}
