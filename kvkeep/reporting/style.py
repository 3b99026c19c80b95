"""The page's style and its few lines of script.

Must not know any figure.  Colours are those of Okabe and Ito, which most colour-blind people tell apart; what they mean
is written beside them as well.
"""

LIGHT = """
--bg:#fbfbf9; --card:#fff; --ink:#1c2024; --soft:#5b6470; --faint:#e4e5e2; --zero:#a5abb3; --accent:#0b63a5;
--off:#8a929c; --gpu:#2b7bba; --both:#c8560a; --gate:#c98a00; --ample:#0a8f6a; --free:#e9ebea; --decode:#7fb8a4;
--good:#0a7d5c; --bad:#b3261e; --wait:#cfd4d8; --room:#a8557f;
"""
DARK = """
--bg:#14171a; --card:#1b1f23; --ink:#e8eaec; --soft:#9aa4af; --faint:#2c3238; --zero:#58626d; --accent:#6db6ee;
--off:#8c96a1; --gpu:#5aa9e2; --both:#f08b3c; --gate:#e6ac2e; --ample:#3cc49a; --free:#262b30; --decode:#3f8a72;
--good:#4ccb9f; --bad:#ff8a80; --wait:#3d454d; --room:#cf7fa8;
"""

CSS = (
    ":root{color-scheme:light dark;" + LIGHT + "}"
    "@media (prefers-color-scheme:dark){:root:not([data-theme=light]){" + DARK + "}}"
    ":root[data-theme=dark]{color-scheme:dark;" + DARK + "}:root[data-theme=light]{color-scheme:light}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
 -webkit-text-size-adjust:100%}
main,header,footer{max-width:820px;margin:0 auto;padding:0 20px}
header{padding-top:36px;display:flex;gap:16px;align-items:flex-start;justify-content:space-between}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 4px;letter-spacing:-.02em;text-wrap:balance}
.sub{margin:0;color:var(--soft);max-width:60ch}
button{font:inherit;font-size:.8125rem;color:var(--soft);background:none;
 border:1px solid var(--faint);border-radius:6px;
 padding:5px 10px;cursor:pointer;white-space:nowrap}
button:hover{color:var(--ink);border-color:var(--zero)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.tiles{list-style:none;margin:28px 0 0;padding:0;display:grid;gap:12px;
 grid-template-columns:repeat(auto-fill,minmax(230px,1fr))}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:10px;padding:16px 18px}
.tile p{margin:0}
.big{font-size:2.25rem;font-weight:650;line-height:1.1;letter-spacing:-.03em;font-variant-numeric:tabular-nums}
.big span{font-size:1.125rem;font-weight:500;color:var(--soft);margin-left:4px;letter-spacing:0}
.what{font-size:.9375rem;line-height:1.35;margin:4px 0 10px!important}
.verdict{font-size:.8125rem;font-weight:600;display:flex;align-items:baseline;gap:7px}
.mark{flex:none;width:9px;height:9px;border-radius:50%;background:var(--off)}
.reached .verdict{color:var(--good)}.reached .mark{background:var(--good)}
.missed .verdict{color:var(--bad)}.missed .mark{background:var(--bad);border-radius:1px}
.noise .mark{background:none;border:2px solid var(--gate)}
.smoke .big{color:var(--soft)}.smoke .verdict,.free .verdict{color:var(--soft)}
.fine{font-size:.75rem;color:var(--soft)}
.cmd{overflow-wrap:anywhere}
nav{margin:26px 0 0;font-size:.875rem;display:flex;flex-wrap:wrap;gap:4px 18px}
a{color:var(--accent);text-underline-offset:3px;text-decoration-thickness:1px}
section{margin:44px 0 0;scroll-margin-top:16px}
h2{font-size:1.1875rem;line-height:1.3;margin:0 0 2px;letter-spacing:-.01em;text-wrap:balance}
.says{margin:0 0 14px;max-width:66ch}
.note{margin:8px 0 0;font-size:.8125rem;color:var(--soft);max-width:74ch}
.origin{margin:6px 0 0;font-size:.75rem;color:var(--soft);overflow-wrap:anywhere}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 8px;padding:0;
 font-size:.8125rem;color:var(--soft)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.k-floor{background:var(--ink);width:2px!important;border-radius:0!important}
.k-bound{background:var(--bad);width:2px!important;border-radius:0!important}
details{margin:10px 0 0;font-size:.875rem}
summary{cursor:pointer;color:var(--soft);width:fit-content}
summary:hover{color:var(--ink)}
.scroll{overflow-x:auto;margin:8px 0 0;border:1px solid var(--faint);border-radius:8px;background:var(--card)}
table{border-collapse:collapse;font-size:.8125rem;width:100%}
th,td{padding:5px 12px;text-align:left;border-bottom:1px solid var(--faint);vertical-align:top;white-space:nowrap}
.long{white-space:normal;min-width:26ch}
tr:last-child td{border-bottom:0}
th{font-weight:600;color:var(--soft)}
.num{text-align:right;font-variant-numeric:tabular-nums}
.absent{list-style:none;padding:0;margin:8px 0 0;font-size:.875rem;color:var(--soft)}
.absent li{padding:7px 0;border-top:1px solid var(--faint)}
.absent b{color:var(--ink);font-weight:600}
footer{padding-top:44px;padding-bottom:48px;font-size:.8125rem;color:var(--soft)}
svg{display:block;max-width:100%;height:auto;overflow:visible;
 font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg.narrow{display:none}
@media (max-width:640px){svg.wide{display:none}svg.narrow{display:block;width:100%}
 main,header,footer{padding-left:16px;padding-right:16px}header{padding-top:22px}.tiles{grid-template-columns:1fr}
 section{margin-top:36px}}
text{fill:var(--ink)}
.tick,.axis{fill:var(--soft);font-size:11.5px;font-variant-numeric:tabular-nums}
.label{font-size:12px}.strong{font-weight:600;font-variant-numeric:tabular-nums}.direct{font-weight:600}
.halo{paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--faint)}.zero{stroke:var(--zero)}
.floor{stroke:var(--ink);stroke-width:2}.bound{stroke:var(--bad);stroke-width:2}
.yours{stroke:var(--ink);stroke-dasharray:3 3}.here{fill:var(--ink);stroke:var(--bg);stroke-width:2}
.series{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}.thin{stroke-width:1.25}
.dot{stroke:var(--bg);stroke-width:.75}
[data-tip]:hover{stroke:var(--ink);stroke-width:1.5}
.wash{fill:var(--off);opacity:.16}
.evict{fill:var(--gate)}.lost{fill:var(--bad)}
.s-queued{fill:var(--wait);background:var(--wait)}.s-room{fill:var(--room);background:var(--room)}
.s-gate{fill:var(--gate);background:var(--gate)}.s-prefill{fill:var(--gpu);background:var(--gpu)}
.s-decode{fill:var(--decode);background:var(--decode)}
.pale{opacity:.3}
#tip{position:fixed;z-index:9;pointer-events:none;max-width:280px;background:var(--ink);color:var(--bg);font-size:.8125rem;
 line-height:1.35;padding:6px 9px;border-radius:6px;opacity:0;transition:opacity .08s;left:0;top:0}
@media print{button,#tip{display:none}section{break-inside:avoid}}
"""
    + "".join(
        f".fill.c-{name},.dot.c-{name},.pale.c-{name}{{fill:var(--{name})}}.series.c-{name}{{stroke:var(--{name})}}"
        f"i.c-{name}{{background:var(--{name})}}.t-{name}{{fill:var(--{name})}}"
        for name in ("off", "gpu", "both", "gate", "ample", "free")
    )
)

SCRIPT = """
(function(){
var root=document.documentElement,button=document.getElementById('theme'),tip=document.getElementById('tip');
function dark(){return root.dataset.theme?root.dataset.theme==='dark':matchMedia('(prefers-color-scheme:dark)').matches}
function name(){button.textContent=dark()?'Light':'Dark'}
button.hidden=false;name();
button.addEventListener('click',function(){root.dataset.theme=dark()?'light':'dark';name()});
document.querySelectorAll('svg[role=img]').forEach(function(svg){
 var title=svg.querySelector('title');
 if(title){svg.setAttribute('aria-label',title.textContent);title.remove()}});
function hide(){tip.style.opacity=0}
function show(event){
 var mark=event.target.closest?event.target.closest('[data-tip]'):null;
 if(!mark)return hide();
 tip.textContent=mark.dataset.tip;
 var x=Math.min(event.clientX+12,innerWidth-tip.offsetWidth-8),y=event.clientY-tip.offsetHeight-10;
 tip.style.transform='translate('+Math.max(8,x)+'px,'+(y<8?event.clientY+16:y)+'px)';tip.style.opacity=1}
document.addEventListener('pointermove',show);document.addEventListener('pointerdown',show);
addEventListener('scroll',hide,{passive:true});
})();
"""
