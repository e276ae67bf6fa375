# SPDX-License-Identifier: Apache-2.0
"""The status page: one document without foreign parts; text from logs is only ever set as text."""

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>nvrx-attrsvc</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{font:14px system-ui,sans-serif;margin:1.5em;color:#222}
table{border-collapse:collapse;margin:1em 0;width:100%}
td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left}
td:last-child{overflow-wrap:anywhere;min-width:5em}
@media(max-width:40em){body{margin:.6em}td,th{padding:.3em .25em}}
tbody tr{cursor:pointer}
.STOP{color:#b00;font-weight:bold}.RESTART{color:#07a}.CONTINUE{color:#070}
pre{background:#f6f6f6;padding:.6em;white-space:pre-wrap;overflow-wrap:anywhere}
</style></head><body>
<h1>Attribution service</h1>
<p id="health">loading</p>
<form id="access" hidden>Token <input id="token" type="password" autocomplete="off">
<button>use</button></form>
<table><thead><tr><th>job</th><th>cycle</th><th>user</th><th>state</th><th>action</th><th>log</th>
</tr></thead><tbody id="jobs"></tbody></table>
<section id="detail" hidden><h2 id="title"></h2><p id="why"></p><h3>Evidence</h3>
<pre id="evidence"></pre><h3>Events</h3><pre id="events"></pre></section>
<script>
const $=id=>document.getElementById(id);
let token='';
async function get(path){
  const headers=token?{Authorization:'Bearer '+token}:{};
  const reply=await fetch(path,{headers});
  if(reply.status===401){$('access').hidden=false;throw new Error('token needed');}
  return reply.json();
}
function cell(row,text,name){
  const td=row.insertCell();td.textContent=text??'';if(name)td.className=name;
}
async function show(job){
  const reply=await get('/logs?wait=false&log_path='+encodeURIComponent(job.log_path));
  const verdict=reply.attribution||{};
  const advice=verdict.action?reply.recommendation:reply.candidate_recommendation;
  $('title').textContent=advice.action+' '+(verdict.reason_code||'');
  $('why').textContent=advice.reason||reply.status;
  $('evidence').textContent=(verdict.evidence||[]).map(e=>e.line+': '+e.quote).join('\\n');
  $('events').textContent=(verdict.events||[])
    .map(e=>e.role+' '+e.code+' x'+e.count+' line '+e.first_line+' ranks '+e.ranks).join('\\n');
  $('detail').hidden=false;
}
async function refresh(){
  try{
    const health=await get('/healthz');
    const jobs=(await get('/jobs')).jobs.reverse();
    const hint=jobs.length?'Choose a line to see its verdict.':'No log was submitted yet.';
    $('health').textContent=health.status+'. '+health.issues.map(i=>i+'. ').join('')+hint;
    const rows=document.createElement('tbody');rows.id='jobs';
    for(const job of jobs){
      const row=rows.insertRow();const action=(job.recommendation||{}).action;
      cell(row,job.job_id);cell(row,job.cycle_id);cell(row,job.user);cell(row,job.status);
      cell(row,action,action);cell(row,job.log_path);
      row.onclick=()=>show(job);
    }
    $('jobs').replaceWith(rows);
  }catch(error){$('health').textContent=String(error);}
}
$('access').onsubmit=event=>{
  event.preventDefault();token=$('token').value;$('access').hidden=true;refresh();
};
refresh();setInterval(refresh,5000);
</script></body></html>
"""
