"""Network interfaces that have no card of their own, told by their names."""

import re
from typing import Final

__all__ = ["virtual_kind"]

_VIRTUAL: Final = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("loopback", r"lo\d*"),
        ("Docker", r"docker.*"),
        ("bridge", r"(br-|br\d|virbr|cni|cbr|lxcbr|lxdbr|podman|vmbr|ovs-|nerdctl).*"),
        ("veth", r"veth.*"),
        ("Calico", r"cali.*"),
        ("Cilium or LXC", r"(cilium|lxc).*"),
        ("tunnel or VPN", r"(tun|tap|wg|tailscale|zt|vxlan|geneve|gre|sit|ipip|flannel|vti).*"),
        ("dummy", r"(dummy|ifb|kube-ipvs|nodelocaldns|vmnet|vnet|macvtap).*"),
        ("wireless", r"wl.*"),
        ("VLAN", r".+\.\d{1,4}"),
        ("bond member", r"bond\d+[-_]slave.*"),
    )
)


def virtual_kind(name: str) -> str | None:
    """Return what kind of virtual (or wireless) interface a name is; None for a network card.

    A bond itself ("bond0", "mlx5_bond_0") is kept: its members have no address, so no tool that
    lists usable interfaces lists them beside it.

    >>> virtual_kind("veth699027eb"), virtual_kind("mlx5_0"), virtual_kind("eno1np0")
    ('veth', None, None)
    """
    return next((kind for kind, pattern in _VIRTUAL if pattern.fullmatch(name)), None)
