"""What the documentation claims: every metric that is logged is in the glossary, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny

from lit_ppo import PPOConfig, PPOLightningModule, PromptDataModule, SamplingConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_logged_metric_is_in_the_glossary(tmp_path):
    names = set(re.findall(r"`([\w/<>]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    known = [re.compile(re.escape(name).replace("<name>", ".+").replace("<phase>", ".+")) for name in names]
    module = PPOLightningModule(
        tiny.folder(),
        reward=[tiny.count_w1, tiny.folder("qwen2", labels=1)],
        sampling=SamplingConfig(max_new_tokens=4, entropy=True),
        eval_sampling=SamplingConfig(max_new_tokens=4, entropy=True),
        ppo=PPOConfig(epochs=1, dual_clip=3.0),
    )
    data = PromptDataModule(tiny.rows(), val=tiny.rows(2), test=tiny.rows(2), batch_size=8)
    trainer = tiny.fit(tmp_path, module, data)
    logged = set(trainer.callback_metrics)
    trainer.test(module, data, verbose=False)
    logged |= set(trainer.callback_metrics)
    assert len(logged) > 35
    unknown = [name for name in logged if not any(k.fullmatch(name) for k in known)]
    assert not unknown, f"not in docs/metrics.md: {unknown}"


def headings(page: Path) -> set[str]:
    """Return the headings of a page as they are linked to."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            file, _, heading = target.partition("#")
            other = page.parent / file if file else page
            assert other.exists(), f"{page.name} links to {target}"
            assert not heading or heading in headings(other), f"{page.name} links to {target}"
