"""Aerodynamic force, moment and coefficients integrated from surface pressure and wall shear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpflare.errors import DataError

Array = NDArray[Any]

_PARTS = ("pressure_force", "shear_force", "pressure_moment", "shear_moment")


@dataclass(frozen=True)
class Reference:
    """What turns forces into coefficients.

    `speed` in m/s, `rho` in kg/m³ (1 for kinematic pressures), `area` in m², `length` in m (None:
    no moment coefficients), `centre` [3] in m.  Where a surface is one half, `mirror` (x, y or z)
    is normal to the plane through `centre` in which the other half is its image; `area` is that
    of both.
    """

    speed: float
    rho: float
    area: float
    length: float | None
    centre: tuple[float, float, float]
    mirror: str | None = None

    def __post_init__(self) -> None:
        if self.mirror not in (None, "x", "y", "z"):
            raise DataError(f"reference mirror is {self.mirror!r}, and must be x, y or z")
        for name in ("speed", "rho", "area", "length"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise DataError(
                    f"reference {name} is {value!r}, and coefficients need a positive number; "
                    "correct `reference` in the field map"
                )
        if len(self.centre) != 3 or not np.isfinite(self.centre).all():
            raise DataError(
                f"reference centre is {self.centre!r}, and moments need three finite coordinates; "
                "correct `reference.centre` in the field map"
            )

    @property
    def dynamic_pressure(self) -> float:
        """½ rho U², in the unit of the pressure."""
        return 0.5 * self.rho * self.speed**2

    @classmethod
    def from_mapping(cls, case: str, constants: Mapping[str, Any]) -> Reference:
        """Read `speed`, `rho`, `area` and optionally `length`, `centre` (default: the origin).

        Raises:
            DataError: a constant is missing or not a positive number.
        """
        missing = [name for name in ("speed", "rho", "area") if constants.get(name) is None]
        if missing:
            raise DataError(
                f"case '{case}' has no reference {', '.join(missing)}; forces need them: set "
                "`reference` in the field map and prepare the store again"
            )
        length, centre = constants.get("length"), constants.get("centre")
        try:
            x, y, z = (float(value) for value in (centre if centre is not None else (0, 0, 0)))
            return cls(
                speed=float(constants["speed"]),
                rho=float(constants["rho"]),
                area=float(constants["area"]),
                length=None if length is None else float(length),
                centre=(x, y, z),
                mirror=constants.get("mirror"),
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"case '{case}': {error}") from error


@dataclass
class ForceSums:
    """Force and moment sums of one case, split into pressure and shear; chunks and ranks add.

    With outward area vectors F = Σ (−p·A_out + shear_sign·τ·|A|) and M = Σ (x − centre) × dF,
    accumulated in float64.  `centre` is the moment's reference point [3] in the frame of the
    positions.  `shear_sign` is −1 where the stored shear is minus the traction on the body, +1
    where it is the traction; 0 leaves the shear out.
    """

    centre: tuple[float, float, float]
    shear_sign: int
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(_PARTS), 3)))

    def __post_init__(self) -> None:
        assert self.shear_sign in (-1, 0, 1), self.shear_sign
        assert self.sums.shape == (len(_PARTS), 3)

    def add(
        self,
        position: Array,
        area_vector: Array,
        area: Array,
        pressure: Array,
        wall_shear: Array | None = None,
    ) -> None:
        """Add one chunk: position [n, 3], outward area_vector [n, 3], area [n], p [n], τ [n, 3].

        A row's area is the polygon's (on points, the dual area); |area_vector| is *not* used for
        it, because on points the two differ.
        """
        arm = np.asarray(position, dtype=np.float64) - np.asarray(self.centre)  # [n, 3]
        outward = np.asarray(area_vector, dtype=np.float64)  # [n, 3]
        p = np.asarray(pressure, dtype=np.float64)  # [n]
        weight = np.asarray(area, dtype=np.float64)  # [n]
        num_rows = len(p)
        if not (
            p.shape == weight.shape == (num_rows,) and arm.shape == outward.shape == (num_rows, 3)
        ):
            raise DataError(
                f"forces need one row a cell: position {arm.shape}, area_vector {outward.shape}, "
                f"area {weight.shape}, pressure {p.shape}"
            )
        # A value that is not finite makes the sums so, too; the metrics name it.
        with np.errstate(over="ignore", invalid="ignore"):
            force = -p[:, None] * outward  # [n, 3]
            self.sums[0] += force.sum(axis=0)
            self.sums[2] += np.cross(arm, force).sum(axis=0)
        if self.shear_sign == 0:
            return
        if wall_shear is None:
            raise DataError("forces with shear need the field 'wall_shear'; none was given")
        tau = np.asarray(wall_shear, dtype=np.float64)  # [n, 3]
        if tau.shape != (num_rows, 3):
            raise DataError(f"wall_shear has shape {tau.shape}; forces need ({num_rows}, 3)")
        with np.errstate(over="ignore", invalid="ignore"):
            force = self.shear_sign * tau * weight[:, None]  # [n, 3]
            self.sums[1] += force.sum(axis=0)
            self.sums[3] += np.cross(arm, force).sum(axis=0)

    def merge(self, other: ForceSums) -> None:
        """Add the sums of another chunk or rank."""
        assert (self.centre, self.shear_sign) == (other.centre, other.shear_sign)
        self.sums += other.sums

    def to_vector(self) -> NDArray[np.float64]:
        """Return a flat float64 copy [12] whose sum over ranks is that of the whole case."""
        return self.sums.reshape(-1).copy()

    @classmethod
    def from_vector(
        cls, vector: Array, *, centre: tuple[float, float, float], shear_sign: int
    ) -> ForceSums:
        """Rebuild the sums from the (summed) vector of `to_vector`."""
        table = np.array(vector, dtype=np.float64).reshape(len(_PARTS), 3)
        return cls(centre, shear_sign, table)

    @property
    def pressure_force(self) -> NDArray[np.float64]:
        """Σ −p·A_out, [3]."""
        return np.array(self.sums[0])

    @property
    def shear_force(self) -> NDArray[np.float64]:
        """Σ shear_sign·τ·|A|, [3]."""
        return np.array(self.sums[1])

    @property
    def force(self) -> NDArray[np.float64]:
        """Pressure and shear force together, [3]."""
        return self.pressure_force + self.shear_force

    @property
    def moment(self) -> NDArray[np.float64]:
        """Moment about `centre`, [3]."""
        total: NDArray[np.float64] = self.sums[2] + self.sums[3]
        return total


def integrate(
    fields: Mapping[str, Array],
    *,
    shear_sign: int,
    centre: tuple[float, float, float] = (0.0, 0.0, 0.0),
    chunk_rows: int = 1 << 20,
) -> ForceSums:
    """Integrate a case held in memory: canonical names -> arrays with corresponding rows.

    Needs `position`, `area_vector`, `area`, `pressure`, and `wall_shear` unless `shear_sign` is 0.
    """
    needed = ["position", "area_vector", "area", "pressure"] + ["wall_shear"] * (shear_sign != 0)
    missing = [name for name in needed if name not in fields]
    if missing:
        raise DataError(f"forces need the fields {', '.join(needed)}; missing: {missing}")
    sums = ForceSums(centre, shear_sign)
    for start in range(0, len(fields["pressure"]), chunk_rows):
        rows = slice(start, start + chunk_rows)
        sums.add(*(fields[name][rows] for name in needed))
    return sums


def coefficients(sums: ForceSums, reference: Reference) -> dict[str, float]:
    """Return Cd, Cl, Cs and, with a reference length, CmPitch, Clf and Clr.

    Axes as canonical: x downstream, y lateral, z up.  Cd = Fx/(qA), Cl = Fz/(qA), Cs = Fy/(qA),
    CmPitch = My/(qAL), Clf = Cl/2 + CmPitch, Clr = Cl/2 − CmPitch, with q = ½ rho U².
    """
    scale = reference.dynamic_pressure * reference.area
    force, moment = sums.force, sums.moment
    if reference.mirror is not None:  # a moment is an axial vector: its image has the other signs
        along = np.arange(3) == "xyz".index(reference.mirror)
        force, moment = np.where(along, 0.0, 2 * force), np.where(along, 2 * moment, 0.0)
    drag, side, lift = (float(component) / scale for component in force)
    values = {"Cd": drag, "Cl": lift, "Cs": side}
    if reference.length is not None:
        pitch = float(moment[1]) / (scale * reference.length)
        values |= {"CmPitch": pitch, "Clf": lift / 2 + pitch, "Clr": lift / 2 - pitch}
    return values
