"""Stand-ins: FOUND have long skips, REFUSED have some that cannot be taken hold of, NEGATIVE have none."""

from tests.standins.common import StandIn, image, image_and_time, randn
from tests.standins.negative import (
    DenseNet,
    DiTStyle,
    GrowingDenseNet,
    Inception,
    InlineResNet,
    Pyramid,
    TwoStreams,
    ViT,
    plain_cnn,
    resnet,
)
from tests.standins.parallel import (
    Branches,
    InputSkip,
    JoinedTwice,
    JoinedTwiceAtOnce,
    OtherJoin,
    SharingCopies,
    SideBySide,
    TwinDecoders,
)
from tests.standins.tokens import HDiTStyle, SkipEncoder, TokenUViT
from tests.standins.tricky import (
    BranchedSkips,
    Draining,
    GatedBranch,
    PlusPlus,
    ProjectingUp,
    RootShortcut,
    SharedDecoder,
    SharedParts,
    Twice,
    TwoInARow,
)
from tests.standins.unets import (
    AdditiveUNet,
    EDM2Style,
    EDMStyle,
    GuidedStyle,
    ResidualUNet,
    TutorialUNet,
    nested_segmentation,
    pix_style,
)

NONE = "no long skip connections"

FOUND = [
    StandIn("guided-diffusion style", GuidedStyle, image_and_time, 4),
    StandIn("EDM style", EDMStyle, image_and_time, 4),
    StandIn("EDM2 style", EDM2Style, image, 4),
    StandIn("nested segmentation", nested_segmentation, lambda: (randn(2, 3, 16, 16),), 3),
    StandIn("pix2pix style", pix_style, image, 2),
    StandIn("tutorial UNet", TutorialUNet, image, 3),
    StandIn("residuals in the root", ResidualUNet, image_and_time, 5),
    StandIn("additive in blocks", AdditiveUNet, image, 3),
    StandIn("HDiT style", HDiTStyle, image, 2),
    StandIn("token U-ViT", TokenUViT, image_and_time, 3),
    StandIn("skip encoder", SkipEncoder, image, 2),
    StandIn("skip encoder, tokens first", lambda: SkipEncoder(batch_first=False), image, 2),
    StandIn("shared parts", SharedParts, image, 3),
    StandIn("shortcuts in the root", RootShortcut, image, 3),
    StandIn("draining blocks", Draining, image, 2),
    StandIn("skips projected in blocks", ProjectingUp, image, 3),
    StandIn("data-dependent branch", GatedBranch, image, 2),
    StandIn("time and frequency branches", Branches, image, 6),
    StandIn("branches of two classes", lambda: Branches(OtherJoin), image, 6),
    StandIn("two UNets side by side", SideBySide, image, 5),
    StandIn("two UNets in a row", TwoInARow, image, 6),
    StandIn("twin decoders", TwinDecoders, image, 6),
    StandIn("input as a skip", InputSkip, image, 3),
    StandIn("a skip joined twice", JoinedTwice, image, 4),
]

REFUSED = [
    StandIn(
        "additive in the root", lambda: AdditiveUNet(in_root=True), image, None, "joined by add in the model itself"
    ),
    StandIn("projected skips", lambda: AdditiveUNet(projected=True), image, None, "passes it through conv2d before"),
    StandIn("shared decoder", SharedDecoder, image, None, "called 2 times in one forward"),
    StandIn("UNet called twice", Twice, image, None, "is called 2 times in one forward"),
    StandIn("one UNet as two branches", lambda: SideBySide(True), image, None, "is called 2 times in one forward"),
    StandIn("a skip twice in one join", JoinedTwiceAtOnce, image, None, "joins the output of .* 2 times at once"),
    StandIn("copies that share weights", SharingCopies, image, None, r"deepcopy of this SharingCopies shares its net"),
    StandIn(
        "draining blocks without modules",
        lambda: Draining(functional=True),
        image,
        None,
        "takes its skips out of the list",
    ),
    StandIn("skips with blocks of their own", BranchedSkips, image, None, "not all skips would be scaled"),
    StandIn(
        "skips projected deeply", lambda: ProjectingUp(layers=2), image, None, "up.0 joins something in the same way"
    ),
    StandIn("UNet++ style", PlusPlus, image, None, "joined more than once"),
]

NEGATIVE = [
    StandIn("plain CNN", plain_cnn, image, 0, NONE),
    StandIn("ResNet", resnet, image, 0, NONE),
    StandIn("ResNet of one block", lambda: resnet(1), image, 0, NONE),
    StandIn("inline ResNet", InlineResNet, image, 0, NONE),
    StandIn("DenseNet", DenseNet, image, 0, f"{NONE}.*several at once, as in "),
    StandIn("DenseNet of one block", lambda: DenseNet(1, 2), image, 0, NONE),
    StandIn("growing DenseNet", GrowingDenseNet, image, 0, NONE),
    StandIn("ViT", ViT, image, 0, NONE),
    StandIn("DiT style", DiTStyle, image_and_time, 0, NONE),
    StandIn("two streams", TwoStreams, image, 0, NONE),
    StandIn("Inception", Inception, image, 0, NONE),
    StandIn("pyramid pooling", Pyramid, image, 0, NONE),
]
