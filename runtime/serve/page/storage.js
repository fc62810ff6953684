// What the browser keeps for the page, as JSON. A browser may refuse to (private windows, a full store): then the page
// works all the same, and forgets.

/** `storage`: "localStorage" or "sessionStorage". By name, since even to mention one may be refused. */
export function recall(storage, key, otherwise) {
  try {
    return JSON.parse(window[storage].getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(storage, key, value) {
  try {
    window[storage].removeItem(key); // if there is no room for the new value, the old one is not to come back
    window[storage].setItem(key, JSON.stringify(value));
  } catch {
    // forgotten
  }
}
