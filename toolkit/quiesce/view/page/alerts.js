/** The badge of firing alerts in the header: how many there are, which, and what to do about each. */

import { h, link } from "./dom.js";
import { localAddress } from "./state.js";
import { parts } from "./units.js";
import { line, violationsAddress } from "./violations.js";

const RANK = { critical: 0, warning: 1, info: 2 };

/** What Prometheus answered, worst first: {name, severity, state, summary, description, since (ms), runbook, labels}. */
export function readAlerts(data) {
  return (data?.alerts ?? []).map(({ labels, annotations, state, activeAt }) => ({
    name: labels.alertname, severity: labels.severity ?? "info", state, since: Date.parse(activeAt), labels, summary: annotations?.summary ?? "", description: annotations?.description ?? "", runbook: annotations?.runbook_url ? localAddress(annotations.runbook_url) : "",
  })).sort((one, two) => (RANK[one.severity] ?? 3) - (RANK[two.severity] ?? 3) || one.since - two.since);
}

/** What the series `ALERTS` said at a moment, in the same shape: a recording has no rules that are judged now. */
export function readAlertSeries(data) {
  return (data?.result ?? []).map(({ metric: { alertname: name, alertstate: state, severity = "info", ...labels } }) => ({
    name, severity, state, since: null, labels: { ...labels, alertname: name, severity }, summary: [labels.invariant, labels.instance].filter(Boolean).join(", "), description: "", runbook: `/runbooks/${name}`,
  })).sort((one, two) => (RANK[one.severity] ?? 3) - (RANK[two.severity] ?? 3) || one.name.localeCompare(two.name));
}

/** Whether an open record of a violation is behind an alert: several invariants may have one alert. */
const isOf = (record, { name, labels }) => record.open && record.alert === name && [undefined, record.invariant].includes(labels.invariant);

/** The badge's element, and `show(alerts | null, now, {records, recorded})` that fills it; the records stand beside their alerts. */
export function alertBadge() {
  const panel = h("div", { class: "alerts", id: "alerts-panel", popover: "auto", role: "region", "aria-label": "Alerts" });
  const button = h("button", { type: "button", class: "badge", popovertarget: "alerts-panel", data: { firing: "0", state: "unknown" } }, "alerts: …");
  panel.addEventListener("beforetoggle", () => {
    const at = button.getBoundingClientRect();
    panel.style.top = `${at.bottom + 8}px`;
    panel.style.right = `${Math.max(8, innerWidth - at.right)}px`;
  });
  let before = "";
  const show = (alerts, now, { records = [], recorded = false } = {}) => {
    if (!alerts) { button.dataset.state = "unknown"; button.textContent = "alerts: ?"; return; }
    const firing = alerts.filter(({ state }) => state === "firing");
    const pending = alerts.length - firing.length;
    const worst = firing[0]?.severity;
    button.dataset.firing = String(firing.length);
    button.dataset.state = firing.length ? (worst === "critical" ? "critical" : "warning") : "calm";
    button.textContent = firing.length ? `▲ ${firing.length} firing` : "✓ no alerts";
    const when = recorded ? "at the end of the range" : "";
    button.title = firing.map(({ name }) => name).join(", ") || `No alert is firing ${when}`.trim();
    const key = JSON.stringify([alerts.map(({ name, state, labels }) => [name, state, labels]), records.map(({ key: id, count, open }) => [id, count, open])]);
    if (key === before && panel.matches(":popover-open")) return;
    before = key;
    panel.replaceChildren(h("h2", {}, `${firing.length ? `${firing.length} firing` : "No alert is firing"} ${when}`, pending ? h("span", { class: "quiet" }, `, ${pending} pending`) : ""),
      ...alerts.map((each) => h("article", { class: "alert", data: { severity: each.state === "firing" ? each.severity : "pending", name: each.name } },
        h("h3", {}, each.name, h("span", { class: "quiet" }, ` ${each.severity}, ${each.state}${each.since ? ` for ${parts(Math.max(1, (now - each.since) / 1000))}` : ""}`)), h("p", {}, each.summary), h("p", { class: "quiet" }, each.description), ...records.filter((record) => isOf(record, each)).slice(0, 5).map((record) => line(record, now)), each.runbook ? link(each.runbook, { class: "runbook" }, `Runbook: ${each.name}`) : null)),
      records.length ? h("p", {}, h("a", { href: violationsAddress(), onclick: () => panel.hidePopover() }, `Records of violations: ${records.filter(({ open }) => open).length} open, ${records.filter(({ open }) => !open).length} closed`)) : "");
  };
  return { element: h("div", { class: "badge-holder" }, button, panel), show };
}
