"""Profiles that PipeDream's authors have published, of layers one behind the other, each with its activation.

From github.com/msr-fiddle/pipedream (7db6a1c), profiler/image_classification/profiles/*/graph.txt: mini-batches of 128
images. Nodes of that graph are summed where more than one value goes on, as in the blocks of a ResNet; the input is
left out, as their optimizer does. Profiles of S2VT and of AWD LM were not published.
"""

from typing import NamedTuple


class ProfiledLayers(NamedTuple):
    """Layers in order, in the units of `pipedream_partition`."""

    times: list[float]
    activation_bytes: list[float]
    weight_bytes: list[float]


def _layers(rows: list[tuple[float, int, int]]) -> ProfiledLayers:
    return ProfiledLayers(
        [milliseconds / 1e3 for milliseconds, _, _ in rows],
        [float(activation) for _, activation, _ in rows],
        [float(weight) for _, _, weight in rows],
    )


# milliseconds forward and backward, bytes handed on, bytes of parameters
VGG_16 = _layers(
    [
        (56.919, 1644167168, 7168),
        (169.297, 1644167168, 147712),
        (9.374, 411041792, 0),
        (59.9, 822083584, 295424),
        (80.574, 822083584, 590336),
        (4.999, 205520896, 0),
        (31.906, 411041792, 1180672),
        (47.584, 411041792, 2360320),
        (51.003, 411041792, 2360320),
        (2.682, 102760448, 0),
        (25.545, 205520896, 4720640),
        (38.786, 205520896, 9439232),
        (41.968, 205520896, 9439232),
        (1.583, 51380224, 0),
        (14.039, 51380224, 9439232),
        (12.119, 51380224, 9439232),
        (13.32, 51380224, 9439232),
        (0.787, 12845056, 0),
        (7.457, 2097152, 411058176),
        (1.752, 2097152, 67125248),
        (0.941, 512000, 16388000),
    ]
)

RESNET_50 = _layers(
    [
        (23.207, 411041792, 38144),
        (3.702, 102760448, 0),
        (42.943, 411041792, 300032),
        (33.091, 411041792, 281600),
        (35.595, 411041792, 281600),
        (46.271, 205520896, 1517568),
        (20.324, 205520896, 1120256),
        (19.802, 205520896, 1120256),
        (21.573, 205520896, 1120256),
        (40.07, 102760448, 6049792),
        (17.383, 102760448, 4468736),
        (16.34, 102760448, 4468736),
        (16.279, 102760448, 4468736),
        (16.184, 102760448, 4468736),
        (17.325, 102760448, 4468736),
        (35.433, 51380224, 24158208),
        (17.001, 51380224, 17850368),
        (19.25, 51380224, 17850368),
        (1.039, 1048576, 0),
        (0.607, 512000, 8196000),
    ]
)
