(() => {
"use strict";
const START = {{ start|tojson }}, COLORS = {{ colors|tojson }};
{% for source in sources %}
{{ source }}
{% endfor %}
})();
