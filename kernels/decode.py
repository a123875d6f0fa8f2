"""What decode on a device and its plain twin agree on."""

POSITIONS_AT_ONCE = 2
"""Positions of an expert that are multiplied with each weight that is read."""

WEIGHT_UNIT = 1 << 40
"""Routing weights are summed as multiples of 1 / WEIGHT_UNIT, which all float32 from 2 ** -16 on are. Sums of 256 stay
below 2 ** 63 as long as weights stay below 2 ** 15."""
