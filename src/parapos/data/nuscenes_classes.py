"""What nuScenes calls things: scenes of each split, classes of the detection task, attributes, cameras."""

from __future__ import annotations

from ..models.unitr.batch import CAMERAS, CLASSES

LIDAR = "LIDAR_TOP"
ATTRIBUTES = (
    *("pedestrian.moving", "pedestrian.sitting_lying_down", "pedestrian.standing"),
    *("cycle.with_rider", "cycle.without_rider", "vehicle.moving", "vehicle.parked", "vehicle.stopped"),
)
RACK = "static_object.bicycle_rack"
CATEGORIES = {  # of the tables, to classes of the detection task
    "vehicle.car": "car",
    "vehicle.truck": "truck",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.trailer": "trailer",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "vehicle.bicycle": "bicycle",
    **{
        f"human.pedestrian.{kind}": "pedestrian" for kind in ("adult", "child", "construction_worker", "police_officer")
    },
    "movable_object.barrier": "barrier",
    "movable_object.trafficcone": "traffic_cone",
}
IGNORED = (
    *("animal", "human.pedestrian.personal_mobility", "human.pedestrian.stroller", "human.pedestrian.wheelchair"),
    *("movable_object.debris", "movable_object.pushable_pullable", RACK),
    *("vehicle.emergency.ambulance", "vehicle.emergency.police"),
)

# numbers of scenes, first to last
_SCENES = {
    "v1.0-trainval": {
        "train": "1-2 4-11 19-34 41-76 120-135 138-139 149-152 154-155 157-168 170-185 187-188 190-196 199-200 202-204 "
        "206-214 218-220 222 224-264 283-306 315-318 321 323-324 328 347-386 388-403 405-408 410-459 461-465 467-469 "
        "471-472 474-480 499-502 504-515 517-518 525-539 541-546 566 568 570-578 580 582-600 639-679 681 683-689 "
        "695-698 700-701 703-719 726-728 730-731 733-741 744 746-747 749-752 757-765 767-769 786-787 789-792 803-806 "
        "808-813 815-817 819-822 847-856 858 860-866 868-873 875-878 880 882-903 945 947 949 952-953 955-961 975-984 "
        "988-992 994-1025 1044-1058 1074-1102 1104-1110",
        "val": "3 12-18 35-36 38-39 92-110 221 268-278 329-332 344-346 519-524 552-565 625-627 629-630 632-638 770-771 "
        "775 777-778 780-784 794-800 802 904-917 919-931 962-963 966-969 971-972 1059-1073",
    },
    "v1.0-test": {
        "test": "77-91 111-119 140 142-148 265-266 279-282 307-314 333-343 481-498 547-551 601-604 606-624 827-831 "
        "833-842 844-846 932-933 935-943 1026-1043",
    },
    "v1.0-mini": {"train": "61 553 655 757 796 1077 1094 1100", "val": "103 916"},
}
VERSIONS = tuple(_SCENES)
SAMPLES = {  # published numbers of keyframes
    **{("v1.0-trainval", "train"): 28_130, ("v1.0-trainval", "val"): 6_019, ("v1.0-test", "test"): 6_008},
    **{("v1.0-mini", "train"): 323, ("v1.0-mini", "val"): 81},
}


def scenes(version: str) -> dict[str, str]:
    """The split of each scene of a version, by name."""
    found = {}
    for split, text in _SCENES[version].items():
        for part in text.split():
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                found[f"scene-{number:04d}"] = split
    return found


__all__ = [
    "ATTRIBUTES",
    "CAMERAS",
    "CATEGORIES",
    "CLASSES",
    "IGNORED",
    "LIDAR",
    "RACK",
    "SAMPLES",
    "VERSIONS",
    "scenes",
]
