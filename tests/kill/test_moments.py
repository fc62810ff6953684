"""kill -9 before every single change a conversion makes to the file system, one after the other, none left out."""

import shutil

import pytest

from support.killing import CATALOG, claims_nothing_false, difference, left_in, same_tree


@pytest.mark.parametrize("workers", [1, 2])
def test_a_conversion(disturbed, forker, made, out, workers):
    for at, done in disturbed(made / "bf16", deed="kill", workers=workers):
        assert done.code == -9
        claims_nothing_false(out, made / "bf16-e4m3")
        left = left_in(out)
        assert len(left.begun) <= workers, at
        forker.finish(made / "bf16", out, workers=workers)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


def test_the_resumption_of_one(disturbed, forker, made, out, tmp_path):
    """Killed, and killed again."""
    begun = tmp_path / "begun"
    forker.convert(made / "bf16", begun, at=45, deed="kill")
    assert left_in(begun).finished
    for _, done in disturbed(made / "bf16", deed="kill", start=begun):
        assert done.code == -9
        claims_nothing_false(out, made / "bf16-e4m3")
        left = left_in(out)
        forker.finish(made / "bf16", out)
        same_tree(out, made / "bf16-e4m3")
        left.is_kept(out)


class TestOverwriting:
    """The directory holds another model: never half of one and half of the other, whatever is run next."""

    def test_a_complete_one(self, disturbed, forker, made, out, tmp_path):
        """Of another recipe. Afterwards one may want the new one still, or wish nothing had been done."""
        old, new = made / "bf16-experts-only", made / "bf16-e4m3"
        for at, done in disturbed(made / "bf16", "--overwrite", deed="kill", start=old):
            assert done.code == -9
            claims_nothing_false(out, old, new)
            self.refuses_or_writes(forker, made / "bf16", "e4m3", new, out, tmp_path / f"new-{at}")
            self.refuses_or_writes(forker, made / "bf16", "experts-only", old, out, tmp_path / f"old-{at}")
            forker.finish(made / "bf16", out, "--overwrite")
            same_tree(out, new)

    def test_one_of_another_source(self, disturbed, forker, made, out, tmp_path):
        """Every shard has the very size of the one it replaces: only the order of things keeps them apart."""
        old, new = made / "tuned-e4m3", made / "bf16-e4m3"
        first = tmp_path / "first"
        shutil.copytree(old, first)
        for at in range(1, 100):  # the moment at which it is no longer called complete
            forker.convert(made / "bf16", first, "--overwrite", at=at, deed="kill")
            if not (first / CATALOG).exists():
                break
        for at, done in disturbed(made / "bf16", "--overwrite", deed="kill", start=first, few="os.rename"):
            assert done.code == -9
            claims_nothing_false(out, new)
            self.refuses_or_writes(forker, made / "bf16", "e4m3", new, out, tmp_path / f"new-{at}")
            self.refuses_or_writes(forker, made / "tuned", "e4m3", old, out, tmp_path / f"old-{at}")
            forker.finish(made / "bf16", out, "--overwrite")
            same_tree(out, new)

    def test_an_unfinished_one(self, disturbed, forker, made, out, tmp_path):
        """A change of mind: the conversion that was killed is not what is wanted any more."""
        for at, _ in disturbed(made / "bf16", deed="kill", few="os.rename"):
            self.refuses_or_writes(forker, made / "tuned", "e4m3", made / "tuned-e4m3", out, tmp_path / f"new-{at}")
            forker.finish(made / "tuned", out, "--overwrite")
            same_tree(out, made / "tuned-e4m3")

    def refuses_or_writes(self, forker, source, recipe, expected, out, copy):
        """What the plain command does with a copy of OUT: all of what it promises, or nothing."""
        shutil.rmtree(copy, ignore_errors=True)
        if out.exists():
            shutil.copytree(out, copy)
        done = forker.convert(source, copy, "--recipe", recipe)
        if done.code == 0:
            same_tree(copy, expected)
        else:
            assert done.code == 2, done.text
            assert "--overwrite" in done.text
            assert difference(copy, out) is None
        shutil.rmtree(copy)
