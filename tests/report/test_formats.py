from kvtool.report import formats
from tests.report.examples import result, variants

VARIANT = variants()[1]


def test_scores_have_the_digits_of_their_scale():
    for value, best, text, difference in [
        (0.5, 1.0, "0.500", "+0.500"),
        (-0.0004, 1.0, "-0.000", "0"),
        (66.66, 100.0, "66.7", "+66.7"),
        (9.8333, None, "9.833", "+9.833"),
        (0.00002, 0.0, "2.0e-05", "+2.0e-05"),
        (-1e-16, None, "-1.0e-16", "0"),
        (12345.6, None, "12346", "+12346"),
        (None, 1.0, "–", ""),
    ]:
        assert (formats.score(value, best), formats.signed(value, best)) == (text, difference)


def test_a_difference_is_better_in_the_direction_of_the_metric():
    for delta, lower_is_better, tone in [
        (0.1, False, "better"),
        (-0.1, False, "worse"),
        (0.1, True, "worse"),
        (-0.1, True, "better"),
        (0.0001, False, ""),  # nothing at the digits shown
        (None, False, ""),
    ]:
        made = result(VARIANT, "a", 0.5, 0.5, delta=delta, lower_is_better=lower_is_better)
        assert formats.tone(made) == tone


def test_sizes_shares_and_tokens_read_at_a_glance():
    assert [formats.size(n) for n in (0, 1023, 1024, 2**20 - 1, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "5.0 TiB",
    ]
    assert [formats.share(x) for x in (0.0123, 0.0994, 0.0996, 0.5, 1.0)] == [
        "1.2%",
        "9.9%",
        "10%",
        "50%",
        "100%",
    ]
    assert [formats.tokens(n) for n in (640, 1024, 131072, 1500)] == ["640", "1K", "128K", "1500"]
