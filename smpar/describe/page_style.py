"""The style of pages: readable in light and dark, on a phone and a laptop, without a file or a network."""

from __future__ import annotations

CSS = """
:root{color-scheme:light dark;--ink:#1c2128;--soft:#59636e;--paper:#fff;--card:#f6f8fa;--line:#d1d9e0;--track:#e6eaef;
--f0:#5b9bd5;--f1:#82b5e2;--b0:#2f8f6b;--b1:#55ad8a;--w0:#d9952c;--w1:#e8b35c;--r:#9a6fc4;--o:#8b949e;--bad:#c4402f}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--paper:#0f1318;--card:#171c23;--line:#313a45;
--track:#242c36;--f0:#3f7fbd;--f1:#5f9bd3;--b0:#2b8a66;--b1:#46a27f;--w0:#bd7f1f;--w1:#d39a43;--r:#8a63b0;--o:#6b7580;
--bad:#ef7565}.cell{background:hsl(var(--h) 35% 27%)!important;border-color:hsl(var(--h) 40% 45%)!important}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.6rem;line-height:1.25;margin:.2em 0 .5em}h2{font-size:1.2rem;margin:2.2em 0 .5em}
h3{font-size:1rem;margin:1.6em 0 .4em}p{margin:.5em 0;max-width:46em}.soft,figcaption,caption{color:var(--soft)}
figcaption,caption{font-size:.88rem;text-align:left}figure{margin:.6em 0 1.2em}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:1em 0}
.facts div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px}
.facts b{display:block;font-size:1.25rem;line-height:1.3}.facts span{color:var(--soft);font-size:.85rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;white-space:nowrap}td.n,th.n{text-align:right;white-space:nowrap}
td.long{min-width:15em}td.w{white-space:nowrap}.row{display:contents}
.bars{display:grid;grid-template-columns:max-content minmax(120px,1fr) max-content;gap:6px 12px;align-items:center;
font-size:.9rem;font-variant-numeric:tabular-nums}
.bar{position:relative;display:flex;height:18px;background:var(--track);border-radius:3px;overflow:hidden}
.bar i{display:block;height:100%}.bar u{position:absolute;top:0;bottom:0;width:2px;background:var(--bad)}
.bar s{position:absolute;top:0;bottom:0;right:0;background:repeating-linear-gradient(45deg,var(--track) 0 4px,
var(--paper) 4px 8px)}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.85rem;color:var(--soft);margin:.4em 0;padding:0;
list-style:none}
.key i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.c-computing,.c-weights{background:var(--f0)}.c-balance,.c-gradients{background:var(--w0)}
.c-waiting,.c-activations{background:var(--b0)}.c-reduction,.c-optimizer-state{background:var(--r)}
.c-optimizer,.c-working{background:var(--o)}.c-plain{background:var(--f0)}
details.plan{border:1px solid var(--line);border-radius:8px;margin:10px 0;background:var(--paper)}
details.plan>summary{cursor:pointer;padding:10px 14px;background:var(--card);border-radius:8px;font-weight:600}
details.plan>summary span{font-weight:400;color:var(--soft)}details.plan>div{padding:0 14px 14px}
svg{display:block;max-width:100%;height:auto}.time svg{min-width:760px;max-width:none;width:100%}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg text.soft{fill:var(--soft)}
svg .axis{stroke:var(--line);stroke-width:1}svg .track{fill:var(--track)}
svg .curve{fill:none;stroke:var(--f0);stroke-width:2}
svg .dot{fill:var(--f0)}svg .best{fill:var(--bad)}
.f0{fill:var(--f0)}.f1{fill:var(--f1)}.b0{fill:var(--b0)}.b1{fill:var(--b1)}.w0{fill:var(--w0)}.w1{fill:var(--w1)}
.r{fill:var(--r)}.o{fill:var(--o)}.k-f{background:var(--f0)}.k-b{background:var(--b0)}.k-w{background:var(--w0)}
.k-r{background:var(--r)}.k-o{background:var(--o)}.k-idle{background:var(--track)}
svg text.n{fill:#fff;font-size:11px}
.nodes{display:flex;flex-wrap:wrap;gap:10px}
.node{border:1px solid var(--line);border-radius:8px;padding:6px 8px 8px;background:var(--card)}
.node p{margin:0 0 4px;font-size:.82rem;color:var(--soft)}
.cells{display:flex;flex-wrap:wrap;gap:4px}
.cell{min-width:50px;padding:3px 6px;border-radius:5px;border:1px solid hsl(var(--h) 45% 60%);
background:hsl(var(--h) 62% 86%);
font-size:.78rem;text-align:center;line-height:1.25}
.cell.none{border-style:dashed;border-color:var(--line);background:none!important;color:var(--soft)}
.three{display:grid;grid-template-columns:repeat(auto-fit,minmax(270px,1fr));gap:0 28px}
@media(max-width:560px){body{font-size:15px}.bars{display:block}.row{display:grid;
grid-template-columns:1fr max-content;gap:2px 10px;margin-bottom:8px}.row .bar{grid-column:1/3;order:3}
h1{font-size:1.35rem}details.plan>div{padding:0 10px 12px}}
"""
