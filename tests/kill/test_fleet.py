"""Several converters, each at work on some of the layers, killed and started in each other's way."""

from support.killing import claims_nothing_false, left_in, same_tree

FIRST, SECOND = ("--layers", "0:1"), ("--layers", "1:2")


def test_a_killed_share(disturbed, forker, made, out):
    """Again the same command, then the other share, then --finish."""
    for at, done in disturbed(made / "bf16", *FIRST, deed="kill", fewest=15):
        assert done.code == -9
        left = left_in(out)
        assert len(left.begun) <= 1, at
        for options in (FIRST, SECOND, ["--finish"]):
            forker.finish(made / "bf16", out, *options)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


def test_a_killed_share_beside_another(disturbed, forker, made, out):
    """The other is started in the middle of the first, and is not disturbed by what becomes of that."""
    other = (made / "bf16", out, *SECOND)
    for at, done in disturbed(made / "bf16", *FIRST, deed="stop kill", meanwhile=other, fewest=15):
        assert done.code == -9
        assert done.meanwhile.code == 0, (at, done.meanwhile.text)
        left = left_in(out)
        assert "layers-01.safetensors" in left.finished, at
        for options in (FIRST, ["--finish"]):
            forker.finish(made / "bf16", out, *options)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


def test_shares_beside_each_other(disturbed, forker, made, out):
    other = (made / "bf16", out, *SECOND)
    for at, done in disturbed(made / "bf16", *FIRST, deed="stop", meanwhile=other, fewest=15):
        assert (done.code, done.meanwhile.code) == (0, 0), (at, done.text, done.meanwhile.text)
        forker.finish(made / "bf16", out, "--finish")
        same_tree(out, made / "bf16-e4m3")


def test_a_killed_finish(disturbed, forker, made, out, tmp_path):
    for options in (FIRST, SECOND):
        forker.finish(made / "bf16", tmp_path / "shares", *options)
    for at, done in disturbed(made / "bf16", "--finish", deed="kill", start=tmp_path / "shares"):
        assert done.code == -9
        claims_nothing_false(out, made / "bf16-e4m3")
        assert len(left_in(out).begun) <= 1, at
        forker.finish(made / "bf16", out, "--finish")
        same_tree(out, made / "bf16-e4m3")


def test_the_whole_beside_a_share(disturbed, forker, made, out):
    """Whoever comes second says that there is a first; or the first had not begun, or was done."""
    for at, share in disturbed(made / "bf16", *FIRST, deed="stop", fewest=15):
        whole = share.meanwhile
        for done in (share, whole):
            assert done.code == 0 or (done.code == 2 and "another mosaic-convert" in done.text), (at, done.text)
        assert 0 in (share.code, whole.code), (at, share.text, whole.text)
        forker.finish(made / "bf16", out)
        same_tree(out, made / "bf16-e4m3")
