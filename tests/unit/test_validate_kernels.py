"""The table reader, its refusals, and the scores of kernel predictions."""

import csv
import gzip
import io

import pytest

from planner.errors import InvalidInputError
from planner.hardware.devices import device
from planner.hardware.kernel_tables import KernelOp
from planner.hardware.kernels import gemm_s
from planner.hardware.power_law import power_law_skew
from planner.validate.kernels import (
    KernelPrediction,
    KernelTable,
    kernel_predictions_csv,
    predict_kernels,
    read_kernels,
    score_kernels,
)

HEAD = "gpu,src,dtype,m,n,k,time_us\n"
LAYER = (
    "gpu,src,moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,"
    "moe_ep_size,distribution,time_us\n"
)
ROWS = "h100_sxm,x,bfloat16,4096,8000,8192,700\nNVIDIA H200,x,fp8,1024,8192,8192,\n"


def read(text: str | bytes, op: KernelOp = "gemm") -> KernelTable:
    """Return the table of a text."""
    content = text.encode() if isinstance(text, str) else text
    return read_kernels(content, op=op, source="t.csv")


def test_rows_are_predicted_as_a_plan_is() -> None:
    table = read(HEAD + ROWS)
    first, second = predict_kernels(table)
    expected = float(gemm_s(device("h100-sxm-80gb"), "bf16", 4096, 8000, 8192))
    assert first == KernelPrediction(expected, "measured", is_known=False)
    assert second.is_known  # 8192 x 8192 is in the table
    assert second.time_s is not None


def test_measured_times_have_no_part_in_a_prediction() -> None:
    changed = ROWS.replace(",700", ",1").replace("8192,\n", "8192,99\n")
    assert predict_kernels(read(HEAD + ROWS)) == predict_kernels(read(HEAD + changed))


def test_a_gzipped_table_with_columns_in_another_order_is_the_same() -> None:
    turned = "time_us,k,n,m,dtype,more,gpu\n700,8192,8000,4096,bf16,z,H100\n"
    one = predict_kernels(read(gzip.compress(turned.encode())))[0]
    assert one == predict_kernels(read(HEAD + ROWS))[0]


def test_predictions_keep_every_column_and_line() -> None:
    table = read(HEAD + ROWS)
    text = kernel_predictions_csv(table, predict_kernels(table))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["m"] for row in rows] == ["4096", "1024"]
    assert [row["time_us"] for row in rows] == ["700", ""]
    assert float(rows[0]["predicted_time_us"]) == pytest.approx(
        1e6 * float(gemm_s(device("h100-sxm-80gb"), "bf16", 4096, 8000, 8192)), rel=1e-4
    )
    again = kernel_predictions_csv(read(text), predict_kernels(read(text)))
    assert again == text


def test_scores_count_training_sizes_with_a_time_apart_for_known_shapes() -> None:
    rows = "h100,x,bf16,4096,8000,8192,700\nh100,x,bf16,512,8000,8192,90\n"
    rows += "h100,x,bf16,4096,8192,8192,670\nh100,x,bf16,4096,8000,8190,\n"
    table = read(HEAD + rows)
    scores = score_kernels(table, predict_kernels(table))
    assert [(s.device, s.is_known, s.num_rows) for s in scores] == [
        ("h100-sxm-80gb", False, 1),
        ("all", False, 1),
        ("h100-sxm-80gb", True, 1),
        ("all", True, 1),
    ]


def test_the_score_is_the_error_of_what_is_given() -> None:
    table = read(HEAD + "".join(f"h100,x,bf16,{2048 * i},77,77,100\n" for i in range(1, 11)))
    given = [KernelPrediction(1e-6 * (100 + i), "measured", is_known=False) for i in range(10)]
    only = score_kernels(table, given)[0]
    assert only.median_error == pytest.approx(0.045)
    assert only.ninetieth_error == pytest.approx(0.081)
    assert only.bias == pytest.approx(0.045)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("quantum,x,bf16,1024,8,8,1", "gpu='quantum' is not known"),
        ("a100,x,fp8,1024,8,8,1", "has no fp8 peak"),
        ("a100,x,int3,1024,8,8,1", "dtype 'int3' is not known"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why_and_the_others_are(row: str, reason: str) -> None:
    first, *_, last = predict_kernels(read(HEAD + ROWS + row + "\n"))
    assert first.time_s is not None
    assert last.time_s is None
    assert reason in last.skipped_reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: is empty"),
        ("gpu,dtype,m,n\nh100,bf16,1,1\n", "has no column 'k'"),
        (HEAD, "has a header and no rows"),
        (HEAD + "h100,x,bf16,1,1\n", "line 2: has 5 cells where the header has 7"),
        (HEAD + ROWS + "h100,x,bf16,-1,1,1,1\n", "line 4: m='-1'; need a whole number"),
        (HEAD + ROWS + "h100,x,bf16,1.5,1,1,1\n", "line 4: m='1.5'"),
        (HEAD + ROWS + "h100,x,bf16,nan,1,1,1\n", "line 4: m='nan'"),
        (HEAD + ROWS + "h100,x,bf16,1e30,1,1,1\n", "line 4: m='1e30'"),
        (HEAD + ROWS + "h100,x,bf16,,1,1,1\n", "line 4: m=''"),
        (HEAD + ROWS + "h100,x,bf16,1,1,1,0\n", "time_us='0'; need a positive number"),
        (HEAD + ROWS + "h100,x,bf16,1,1,1,inf\n", "time_us='inf'"),
        ("m," + HEAD + "1,h100,x,bf16,1,1,1,1\n", "column 'm' occurs twice"),
        (HEAD + 'h100,"x,bf16,1,1,1,1\n', "is no CSV"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"\x1f\x8bnot gzip at all", "is no whole gzip file"),
    ],
)
def test_what_is_no_table_is_refused_with_line_and_column(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message.replace("'", ".")):
        read(text)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            "1024,2048,768,8,128,1,3,balanced",
            "num_experts=128 with moe_ep_size=3; moe_ep_size must",
        ),
        ("1024,2048,768,8,128,5,1,balanced", "inter_size=768 with moe_tp_size=5"),
        ("1024,2048,768,20,8,1,1,balanced", "topk=20 with num_experts=8; topk must be at most"),
        ("1024,2048,768,8,100000,1,1,power_law_1.2", "at most 65,536 experts"),
        ("1024,2048,768,8,128,1,8,nonsense", "distribution='nonsense'; need 'balanced'"),
        ("1024,2048,768,8,128,1,8,", "distribution=''"),
        ("1024,2048,768,8,128,1,8,xpower_law_1.2", "distribution='xpower_law_1.2'"),
        ("1024,2048,768,8,128,1,8,power_law_1", "and not 1"),
        ("1024,2048,768,8,128,1,8,power_law_", "need 'balanced'"),
        ("1024,2048,768,8,128,1,8,power_law_nan", "need 'balanced'"),
        ("1024,2048,768,8,128,1,8,power_law_-5", "need 'balanced'"),
        ("1024,2048,768,8,128,1,8,power_law_1e308", "need 'balanced'"),
        ("1024,2048,768,8,128,1,8,power_law_\u0662", "need 'balanced'"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_and_the_others_are_predicted(
    sizes: str, reason: str
) -> None:
    good = "h100,x,bf16,1024,2048,768,8,128,1,8,balanced,1\n"
    first, bad, last = predict_kernels(
        read(LAYER + good + f"h100,x,bf16,{sizes},1\n" + good, "moe_layer")
    )
    assert reason in bad.skipped_reason
    assert first == last
    assert first.time_s is not None


def test_key_value_heads_divide_the_heads() -> None:
    head = "gpu,src,batch_size,seq_len,num_heads,num_key_value_heads,head_dim,time_us\n"
    rows = "h100,x,1,4096,32,7,128,1\nh100,x,1,4096,32,64,128,1\nh100,x,1,4096,32,8,128,1\n"
    *bad, good = predict_kernels(read(head + rows, "attention"))
    assert all("num_key_value_heads must divide num_heads" in one.skipped_reason for one in bad)
    assert good.basis == "measured"


def test_the_basis_is_what_the_prediction_rests_on() -> None:
    """Not what the device's entry says: another exponent, another precision, another chip."""
    layers = LAYER + "".join(
        f"h100,x,bf16,1024,2048,768,8,128,1,8,{word},1\n"
        for word in ("balanced", "power_law_1.2", "power_law_1.5")
    )
    found = [one.basis for one in predict_kernels(read(layers, "moe_layer"))]
    assert found == ["measured", "measured", "roofline"]
    rows = "b200,x,nvfp4,1024,8,8,1\nA40,x,bf16,1024,8,8,1\nmi300x,x,bf16,1024,8,8,1\n"
    found = [one.basis for one in predict_kernels(read(HEAD + rows))]
    assert found == ["derived", "borrowed", "roofline"]


def test_uneven_layers_take_longer_than_even_ones() -> None:
    rows = "".join(
        f"h100,x,bf16,8192,7168,2048,8,256,1,16,{word},\n"
        for word in ("balanced", "power_law_1.01", "power_law_1.2")
    )
    even, *uneven = predict_kernels(read(LAYER + rows, "moe_layer"))
    assert even.time_s is not None
    assert all(one.time_s is not None and one.time_s > even.time_s for one in uneven)


def test_the_hottest_of_more_ranks_is_further_from_the_mean() -> None:
    skews = [power_law_skew(4096, 256, ep, 1.2) for ep in (1, 2, 8, 64, 256)]
    assert skews[0] == 1.0
    assert skews == sorted(skews)
    assert skews[-1] < 256
