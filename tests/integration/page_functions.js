// Calls the page's pure functions; the expression is evaluated in the page by test_view_page.py.
async () => {
  const [u, t, i, v, f, s, x, p] = await Promise.all(['units', 'timerange', 'intervals', 'interpolate', 'frames', 'state', 'transforms', 'panel-timeseries']
    .map(name => import(`/page/${name}.js`)));
  const at = (width, pixels, scrape, more = {}) => { const r = i.timing({range: {from: 1.7e12, to: 1.7e12 + width}, pixels, scrapeMs: scrape, ...more}); return [r.step, r.rateInterval]; };
  const several = {value: ['a.b', 'c'], multi: true, includeAll: true};
  const matrix = [{metric: {k: 'x'}, values: [[1, '1'], [2, '2'], [5, '3']]}];
  const bars = (y, mode) => ({custom: {drawStyle: 'bars', stacking: {mode}}, drawn: {x: [1, 2, 3], y}});
  return {
    piled: p.piled([bars([1, null, 2], 'normal'), bars([3, 4, null], 'normal'), bars([9, 9, 9], 'none')]),
    units: [[0.000123, 's'], [90, 's'], [5400, 's'], [1234, 'short'], [0.12345, 'percentunit'], [1536, 'bytes'], [12.5, 'ops'], [0, 's'], [NaN, 's'], [7, 'none']]
      .map(([value, unit]) => u.format(value, unit)),
    ago: u.format(1e12 - 65e3, 'dateTimeFromNow', undefined, 1e12),
    steps: [at(900e3, 600, 1000), at(3600e3, 600, 15000), at(86400e3, 600, 15000), at(900e3, 600, 1000, {target: {interval: '30s'}})],
    built: i.builtins({from: 0, to: 900e3}, i.timing({range: {from: 0, to: 900e3}, pixels: 600, scrapeMs: 15000})),
    promql: [v.interpolate('{a="$one",b=~"$many",c=~"${all}"}[$__rate_interval] $none', {one: {value: 'q"r'}, many: several, all: {...several, all: true, allValue: '.*'}, __rate_interval: '1m'})],
    gap: f.fromMatrix({refId: 'A', legendFormat: '{{k}}'}, matrix, 1000, {}).map(frame => [frame.name, frame.fields[1].values]),
    buckets: f.buckets([['+Inf', 5], ['0.1', 2], ['1', 4]].map(([le, value]) => ({name: le, fields: [{type: 'time', values: [0]}, {type: 'number', values: [value], labels: {le}}]}))).counts,
    range: [t.resolve({from: 'now-15m', to: 'now'}, 1e12), t.resolve({from: 'now', to: 'now-1h'}, 1e12), t.covering(1e12 - 400e3, 1e12, 'now-1h')],
    address: [s.localAddress('/d/quiesce-slots/x?from=now-1h&to=now&var-run=a'), s.localAddress('https://x.example/runbooks/QuiesceDrainSlow.html'), s.write({...s.parse('#/d/a?from=1&to=2&var-k=x&var-k=y&refresh=5s')})],
    organised: x.transform([{fields: [{name: 'a', values: [1], labels: {}, config: {}}, {name: 'b', values: [2], labels: {}, config: {}}]}], [{id: 'organize', options: {excludeByName: {a: true}, renameByName: {b: 'B'}}}])[0].fields.map(field => field.name),
  };
}
