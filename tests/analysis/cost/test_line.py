"""Lines over the bytes of calls, by which simulated steps and advice know their times."""

import pytest

from mirrorc.analysis.cost.line import Line


def test_a_line_goes_through_what_was_measured() -> None:
    assert Line.through([]).at(5.0) == 0.0
    assert Line.through([(4.0, 2.0), (5.0, 2.5)]).at(10.0) == 5.0  # alike: in proportion
    assert Line.through([(0.0, 2.0), (0.0, 4.0)]).at(10.0) == 3.0
    assert Line.through([(10.0, 3.0), (20.0, 5.0)]).at(40.0) == pytest.approx(9.0)
    falling = Line.through([(1.0, 5.0), (10.0, 1.0)])
    assert falling.seconds_per_byte == 0.0 and falling.at(100.0) == 3.0
    steep = Line.through([(1.0, 0.0), (10.0, 10.0)])
    assert steep.seconds == 0.0 and steep.at(5.5) == pytest.approx(5.0)


def test_sizes_that_are_alike_cost_a_nominal_byte_and_the_rest_for_each_call() -> None:
    alike = Line.through([(100.0, 3.0), (110.0, 5.0)], nominal=0.01)
    assert alike.seconds_per_byte == 0.01 and alike.seconds == pytest.approx(2.95)
    assert Line.through([(100.0, 0.5)], nominal=0.01) == Line(0.0, 0.005), "no more than a call takes"
    near = [(10.0, 2.0), (30.0, 4.0)]
    assert Line.through(near, nominal=0.01).seconds_per_byte == pytest.approx(0.1)
    assert Line.through(near, nominal=0.01, telling_bytes=50).seconds_per_byte == 0.01
