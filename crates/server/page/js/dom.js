// Elements, and what is said to those who do not see them. Text of a model or a user only ever becomes text nodes.

export const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `text`, attributes) and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') node.textContent = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter(Boolean));
  return node;
}

/** A button with a picture that does `action` to a turn: a name that `app.js` knows. */
export function tool(name, label, action, turn) {
  const properties = { class: 'icon', title: label, 'aria-label': label, 'data-action': action, 'data-turn': turn };
  return make('button', properties, icon(name));
}

function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.setAttribute('aria-hidden', 'true');
  svg.append(use);
  return svg;
}

/** To a screen reader. */
export function say(text) { $('status').textContent = text; }
