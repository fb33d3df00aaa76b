"""The other side of test_safetensors: the public safetensors package reads what our writer wrote, and writes what our reader reads.

safetensors_peer.py check FILE    exit 0 when FILE holds exactly the tensors below
safetensors_peer.py write FILE
safetensors_peer.py copy FILE COPY  reads all of FILE and writes it as COPY, metadata as they were
"""
import sys

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError:
    sys.exit(77)  # the customary status of a skipped test

# name: (dtype, shape). Element bytes are (7 i + 3) mod 256, in BOOL i mod 2; test_safetensors.c has the same list.
TENSORS = {
    "bool": (torch.bool, [5]),
    "u8": (torch.uint8, [3, 1]),
    "i8": (torch.int8, [7]),
    "e4m3": (torch.float8_e4m3fn, [2, 3]),
    "e5m2": (torch.float8_e5m2, [1, 1, 5]),
    "i16": (torch.int16, [3]),
    "f16": (torch.float16, [2, 2, 3]),
    "blocks.0.\u00e9\"quoted\\": (torch.bfloat16, [3, 5]),
    "i32": (torch.int32, [4]),
    "f32": (torch.float32, [3, 3]),
    "i64": (torch.int64, []),
    "f64": (torch.float64, [2]),
    "empty": (torch.float32, [4, 0]),
}
METADATA = {"format": "pt", "options": 'a "b" \\ / \u4e2d\n'}


def pattern(dtype, shape):
    count = 1
    for extent in shape:
        count *= extent
    size = torch.empty(0, dtype=dtype).element_size()
    one = dtype == torch.bool
    data = [i % 2 if one else (7 * i + 3) % 256 for i in range(count * size)]
    return torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(shape)


def check(path):
    with safe_open(path, framework="pt") as f:
        metadata = {k: v for k, v in f.metadata().items() if not k.startswith("crc32c")}
        assert metadata == METADATA, metadata
        assert sorted(f.keys()) == sorted(TENSORS), f.keys()
        for name, (dtype, shape) in TENSORS.items():
            found, wanted = f.get_tensor(name), pattern(dtype, shape)
            assert found.dtype == dtype and list(found.shape) == shape, (name, found.dtype, found.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name


def copy(path, to):
    with safe_open(path, framework="pt") as f:
        save_file({name: f.get_tensor(name) for name in f.keys()}, to, f.metadata())


if sys.argv[1] == "check":
    check(sys.argv[2])
elif sys.argv[1] == "copy":
    copy(*sys.argv[2:])
else:
    save_file({name: pattern(*spec) for name, spec in TENSORS.items()}, sys.argv[2], METADATA)
