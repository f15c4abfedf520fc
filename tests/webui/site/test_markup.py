"""Line breaks in names and commands, which stay text."""

from rhyme_openrlhf.webui.site.text import breakable, whole_options


def test_names_break_at_their_joints() -> None:
    assert breakable("eval/sort_pass1") == "eval/<wbr>sort_<wbr>pass1"
    assert breakable("Reward over steps") == "Reward over steps"
    assert breakable("<b>_x") == "&lt;b&gt;_<wbr>x"


def test_options_stay_in_one_piece() -> None:
    assert (
        whole_options("rhyme train --run.name 'a <b>' -f")
        == 'rhyme train <span class="whole">--run.name</span> &#39;a &lt;b&gt;&#39; <span class="whole">-f</span>'
    )
    # The value after "=" may break: a path is long.
    assert whole_options("--a.b=/long/path") == '<span class="whole">--a.b</span>=/long/path'
    assert whole_options("a--b -1") == "a--b -1"
